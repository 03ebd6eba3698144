from rltrain.training.uncompiled import import_megatron

import_megatron()
