// Included first: products and sums of the file are rounded one by one, as NumPy does.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
