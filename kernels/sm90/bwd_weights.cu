// The backward of sm90/bwd.cu that also adds up what arrays of a score function need of dS (attn/score_sums.cuh).
#define WEIGHTED_SUMS
#include "sm90/bwd.cu"
