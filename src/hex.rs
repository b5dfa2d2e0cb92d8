//! Bytes as text, two digits each.

pub fn encode(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string");
        text
    })
}

pub fn decode(text: &str) -> Option<Vec<u8>> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let digits = text.as_bytes();
    digits.len().is_multiple_of(2).then(|| digits.chunks(2).map(byte).collect())?
}
