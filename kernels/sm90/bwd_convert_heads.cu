// The same where each head's scores have a slope of their own (cfg::slopes_of_heads).
#include "sm90/bwd_convert.cuh"
#include "sm90/bwd_factor.cuh"

extern "C" __global__ void __launch_bounds__(128 * sm90::bwd::warpgroups) backward_convert(const __grid_constant__ Params p) {
    sm90::bwd::convert_queries(p, [&](i32 instance) { return sm90::bwd::score_factor(p, instance / p.heads, instance % p.heads); });
}
