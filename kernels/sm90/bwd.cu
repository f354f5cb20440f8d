// Attention backward for compute capability 9.0 (FlashAttention algorithm 4 and FlashMask algorithm 2, tile by tile).
#include "sm90/bwd_block.cuh"

extern "C" __global__ void __launch_bounds__(sm90::bwd::threads, 1)
attention_backward(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                   const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                   const __grid_constant__ ptx::TensorMap do_map, const __grid_constant__ ptx::TensorMap dk_map,
                   const __grid_constant__ ptx::TensorMap dv_map) {
    sm90::bwd::run_block(p, {q_map, k_map, v_map, do_map, dk_map, dv_map, q_map, q_map});
}
