from rltrain.training.megatron.uncompiled import import_megatron

import_megatron()  # before any module of this package imports it
