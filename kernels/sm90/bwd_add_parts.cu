// dK and dV of several blocks to a key tile (sm90/bwd_add_parts.cuh), where no dQ is converted beside them.
#include "sm90/bwd_add_parts.cuh"

extern "C" __global__ void __launch_bounds__(256, 4) backward_add_parts(const __grid_constant__ Params p) { sm90::bwd::add_parts(p); }
