// The conversion of sm90/bwd_convert_heads.cu, and the gradient of an array that a score function reads: the first blocks add that up
// (attn/score_gather.cuh).
#include "attn/score_gather.cuh"
#include "sm90/bwd_convert.cuh"
#include "sm90/bwd_factor.cuh"

static_assert(cfg::warps == 4 * sm90::bwd::warpgroups && !cfg::tail && !cfg::in_parts);

extern "C" __global__ void __launch_bounds__(128 * sm90::bwd::warpgroups, 3) backward_convert(const __grid_constant__ ScoreSumsParams p) {
    if (gathers(p)) return gather(p);
    sm90::bwd::convert_queries(p, [&](i32 instance) { return sm90::bwd::score_factor(p, instance / p.heads, instance % p.heads); });
}
