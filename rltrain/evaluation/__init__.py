"""What an evaluation tells: estimates from several samples of a prompt, and which policy was the best so far."""
