// The gradient of an array of which a score function reads one element for each row and key: sm90/bwd_dbias.cu with a weight.
#define LEARNED_ELEMENTS
#include "sm90/bwd_dbias.cu"
