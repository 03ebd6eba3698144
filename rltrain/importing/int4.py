"""Training for INT4 by fake quantisation, as other trainers ask for it."""

WEIGHTS = (
    "model.fake_quantization: trainer and engines start from weights in bfloat16, so model.path has to be such a "
    "checkpoint, and not the one in INT4 that the source gives its engines; engines hold the rounded weights in "
    "model.dtype, which draws as INT4 does and saves no memory"
)
