// The score and mask functions of a call: generated text takes the place of this file, or of one of its halves.
#pragma once
#include "attn/unmasked.cuh"
#include "attn/untraced.cuh"
