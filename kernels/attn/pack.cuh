// Neighbours that are loaded and stored in one access.
#pragma once

constexpr int kPackBytes = 16;  // of the widest access

template <class T, int N>
struct alignas(sizeof(T) * N < kPackBytes ? sizeof(T) * N : kPackBytes) Pack {
    T x[N];
};
