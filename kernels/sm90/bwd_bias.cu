// The backward of sm90/bwd.cu where tiles of the bias or of its gradient travel by the copy engine.
#include "sm90/bwd_block.cuh"

extern "C" __global__ void __launch_bounds__(sm90::bwd::threads, 1)
attention_backward(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                   const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                   const __grid_constant__ ptx::TensorMap do_map, const __grid_constant__ ptx::TensorMap dk_map,
                   const __grid_constant__ ptx::TensorMap dv_map, const __grid_constant__ ptx::TensorMap bias_map,
                   const __grid_constant__ ptx::TensorMap dbias_map) {
    sm90::bwd::run_block(p, {q_map, k_map, v_map, do_map, dk_map, dv_map, bias_map, dbias_map});
}
