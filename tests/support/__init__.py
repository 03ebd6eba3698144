"""What tests share: small models and checkpoints, stand-ins, programs and functions that jobs of tests run."""
