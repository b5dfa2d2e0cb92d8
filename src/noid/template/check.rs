//! The alphabet, and the check character over an id.

use super::CheckScope;

/// Digits, and letters that make no words: no vowels, and no `l` or `y`.
pub const ALPHABET: &[u8; RADIX] = b"0123456789bcdfghjkmnpqrstvwxz";

pub const RADIX: usize = 29;

/// No digit of any radix.
const OUTSIDE: u8 = u8::MAX;

const DIGITS: [u8; 256] = {
    let mut digits = [OUTSIDE; 256];
    let mut index = 0;
    while index < RADIX {
        digits[ALPHABET[index] as usize] = index as u8;
        index += 1;
    }
    digits
};

/// What a character stands for, or more than any digit for those outside the alphabet.
pub fn digit(character: u8) -> u8 {
    DIGITS[character as usize]
}

/// How ids of a template are checked: each character weighs its value times its place, and the sum is told modulo 29. What
/// stands before the digits is weighed once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    pub scope: CheckScope,
    sum: u64,
    places: u64,
}

impl Check {
    /// Over everything before the check character. Bytes outside the alphabet take a place and weigh nothing.
    pub fn over(before: &str) -> Self {
        let weight = |byte| match digit(byte) {
            OUTSIDE => 0,
            digit => u64::from(digit),
        };
        let weigh = |sum, (index, byte): (usize, u8)| sum + weight(byte) * (index as u64 + 1);
        Self { scope: CheckScope::Whole, sum: before.bytes().enumerate().fold(0, weigh), places: before.len() as u64 }
    }

    /// Over what follows the label of an ARK.
    pub fn over_ark(before: &str) -> Option<Self> {
        let (_, name) = before.split_once("ark:")?;
        Some(Self { scope: CheckScope::Ark, ..Self::over(name.strip_prefix('/').unwrap_or(name)) })
    }

    pub fn begin(&self) -> Weighed {
        Weighed { sum: self.sum, places: self.places }
    }

    /// The character for these digits.
    pub fn character(&self, digits: &[u8]) -> u8 {
        let mut weighed = self.begin();
        digits.iter().for_each(|digit| weighed.add(*digit));
        weighed.character()
    }
}

/// A check under way.
#[derive(Default)]
pub struct Weighed {
    sum: u64,
    places: u64,
}

impl Weighed {
    pub fn add(&mut self, digit: u8) {
        self.places += 1;
        self.sum += u64::from(digit) * self.places;
    }

    pub fn character(self) -> u8 {
        ALPHABET[self.sum as usize % RADIX]
    }
}
