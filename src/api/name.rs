//! Names that stand in subjects.

use std::{borrow::Borrow, fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, de};

use crate::error::{Code, Error};

/// The name of a key, pool, tenant or source: `[A-Za-z0-9_-]{1,255}`, so that it is always one token of a subject.
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Name(Arc<str>);

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if (1..=255).contains(&text.len()) && text.bytes().all(allowed) {
            Ok(Self(text.into()))
        } else {
            Err(Error::new(Code::InvalidKey, "invalid key format: 1 to 255 letters, digits, '_' or '-'"))
        }
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// What an operation acts on: the tokens at the end of its subject, which is where access is granted.
pub trait Target: Clone + Send + Sync + Sized + 'static {
    /// How many names it has.
    const NAMES: usize;

    /// The names in the order of the subject.
    fn names(&self) -> Vec<&Name>;

    /// From as many names as [`Target::NAMES`] says.
    fn from_names(names: Vec<Name>) -> Option<Self>;
}

impl Target for () {
    const NAMES: usize = 0;

    fn names(&self) -> Vec<&Name> {
        Vec::new()
    }

    fn from_names(names: Vec<Name>) -> Option<Self> {
        names.is_empty().then_some(())
    }
}

impl Target for Name {
    const NAMES: usize = 1;

    fn names(&self) -> Vec<&Name> {
        vec![self]
    }

    fn from_names(names: Vec<Name>) -> Option<Self> {
        <[Name; 1]>::try_from(names).ok().map(|[name]| name)
    }
}

impl Target for (Name, Name) {
    const NAMES: usize = 2;

    fn names(&self) -> Vec<&Name> {
        vec![&self.0, &self.1]
    }

    fn from_names(names: Vec<Name>) -> Option<Self> {
        <[Name; 2]>::try_from(names).ok().map(|[first, second]| (first, second))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_token_of_a_subject() {
        for good in ["a", "orders", "Orders_2024-x", &"x".repeat(255)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in ["", "a.b", "a b", "*", ">", "é", "a\n", "$KV", &"x".repeat(256)] {
            assert_eq!(bad.parse::<Name>().unwrap_err().code, Code::InvalidKey, "{bad:?}");
        }
    }
}
