// dQ of kernels/sm90/bwd.cu as rows (sm90/bwd_convert.cuh).
#include "sm90/bwd_convert.cuh"

extern "C" __global__ void __launch_bounds__(128 * sm90::bwd::warpgroups, cfg::tail ? 4 : 0) backward_convert(const __grid_constant__ Params p) {
    sm90::bwd::convert_queries(p, [&](i32) { return static_cast<float>(p.scale * p.dropout_scale); });
}
