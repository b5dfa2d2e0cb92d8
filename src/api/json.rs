//! JSON that passes through.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeOwned, Error as _, MapAccess, Visitor},
    ser::Error as _,
};
use serde_json::{Number, Value};

/// A JSON value that nobody has looked into yet: it goes from the ledger to its reader by the thousand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Json(String);

impl Json {
    /// From text that is JSON.
    pub(crate) fn from_text(text: &str) -> Self {
        Self(text.to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What it says.
    pub fn parse<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_str(&self.0)
    }
}

/// A number that was altered when it was read: there is no place for so many digits in a float.
pub fn altered(value: &Value) -> Option<&Number> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() && number.as_f64().is_none_or(|one| one.abs() >= EXACT) => {
            Some(number)
        }
        Value::Array(values) => values.iter().find_map(altered),
        Value::Object(members) => members.values().find_map(altered),
        _ => None,
    }
}

/// The members of an object as they came: one that is given twice is there twice.
pub struct Members<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Members<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Reader<V> {
            type Value = Members<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<V>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Reader(PhantomData))
    }
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        Self(value.to_string())
    }
}

/// As the value that it is, in whatever encoding.
impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = serde_json::Deserializer::from_str(&self.0);
        serde_transcode::transcode(&mut text, serializer).map_err(S::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut text = Vec::with_capacity(128);
        serde_transcode::transcode(deserializer, &mut serde_json::Serializer::new(&mut text))
            .map_err(D::Error::custom)?;
        String::from_utf8(text).map(Self).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::Encoding;

    #[test]
    fn it_comes_out_of_both_encodings_as_it_went_in() {
        let values = [
            json!({ "region": "eu \"west\"", "zones": [1, -2, 2.5, 18446744073709551615_u64], "deep": { "a": { "b": [] } } }),
            json!([null, true, "", {}]),
            json!("ß"),
            json!(0),
        ];
        for value in values {
            for encoding in [Encoding::Json, Encoding::MessagePack] {
                let body = encoding.encode(&Some(Json::from(&value))).unwrap();
                assert_eq!(body, encoding.encode(&value).unwrap(), "the same bytes as of the value itself");
                let read: Option<Json> = encoding.decode_reply(&body).unwrap();
                assert_eq!(read.unwrap().parse::<Value>().unwrap(), value);
            }
        }
        assert_eq!(Encoding::MessagePack.decode_reply::<Option<Json>>(b"\xc0").unwrap(), None);
    }
}
