"""``all_reduce_add_rmsnorm_fp4quant``: outputs are checked as in ``add_rmsnorm_fp4quant``, with a group of one rank."""

from expected import after_addition, rmsnorm_fp4quant

ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, str group, Tensor? global_scale=None, float eps=1e-6, "
    "int block_size=16, str? scale_format=None, str scale_layout='128x4', bool weight_plus_one=False"
)
SCHEMA = f"cute::all_reduce_add_rmsnorm_fp4quant({ARGUMENTS}) -> (Tensor y, Tensor scale)"
OUT_SCHEMA = f"cute::all_reduce_add_rmsnorm_fp4quant.out({ARGUMENTS}, *, Tensor(b!) y, Tensor(c!) scale) -> ()"

results, assert_results = after_addition(rmsnorm_fp4quant)
