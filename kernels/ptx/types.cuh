// Short names for the fixed-width integers that instructions speak of (run-time compilation has no <cstdint>).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
