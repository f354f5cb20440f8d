// Attention forward for compute capability 9.0 with a bias that comes in tiles: one more map.
#define BIAS_ARGUMENT , const __grid_constant__ ptx::TensorMap bias_map
#include "sm90/fwd.cu"
