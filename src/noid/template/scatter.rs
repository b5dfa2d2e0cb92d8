//! Numbers scattered over the values of a pool, as if by chance but always in the same way.
//!
//! The values lie in bins of equal size, and perhaps a smaller last one. Numbers go round over the bins and take the next
//! value of each; when the smaller bin is used up, they go round over the others.

/// As many bins as people get who name none, or none that makes sense.
pub const DEFAULT_BINS: u64 = 293;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scatter {
    /// Values in a bin.
    bin: u64,
    /// Bins of this size.
    full: u64,
    /// Values in the last, smaller one.
    tail: u64,
    /// From this number on, the smaller one is used up.
    late: u64,
}

impl Scatter {
    pub fn new(size: u64, bins: Option<u64>) -> Self {
        let bins = bins.filter(|bins| (1..10_000).contains(bins)).unwrap_or(DEFAULT_BINS);
        let bin = size / bins + 1;
        let (full, tail) = (size / bin, size % bin);
        // At most the size, because the tail is smaller than a bin.
        Self { bin, full, tail, late: (full + 1) * tail }
    }

    pub fn value(&self, number: u64) -> u64 {
        let (bin, offset) = if number < self.late {
            (number % (self.full + 1), number / (self.full + 1))
        } else {
            let number = number - self.late;
            (number % self.full, self.tail + number / self.full)
        };
        bin * self.bin + offset
    }

    pub fn number(&self, value: u64) -> u64 {
        let (bin, offset) = (value / self.bin, value % self.bin);
        if offset < self.tail {
            offset * (self.full + 1) + bin
        } else {
            self.late + (offset - self.tail) * self.full + bin
        }
    }
}
