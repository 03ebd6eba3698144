from rltrain.training.megatron.uncompiled import import_megatron

import_megatron()  # before a module of this package does
