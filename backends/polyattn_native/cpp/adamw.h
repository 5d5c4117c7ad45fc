// The argument structure of AdamW's update, which Python fills.
#pragma once

/// The numbers of an update, the same for all elements.
struct AdamWStep {
    double mean_decay, square_decay;  // β₁ and β₂
    double factor, inside, outside;   // lr · √(1 − β₂ᵗ) / (1 − β₁ᵗ), ε inside the root and outside, both bias-corrected
    double decay;                     // lr · weight decay
    double least, most;               // the squares of the magnitudes between which a square is exact to rounding
};
