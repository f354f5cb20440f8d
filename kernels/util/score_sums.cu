// The gradient of an array that a score function reads, of sums that sm80/bwd_score.cu and others left (attn/score_gather.cuh).
//
// Grid   elements / owned
#include "attn/score_gather.cuh"

extern "C" __global__ void __launch_bounds__(32 * cfg::warps, 2) score_sums(const __grid_constant__ ScoreSumsParams p) { gather(p); }
