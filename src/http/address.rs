//! Who is at the other end.

use std::net::{IpAddr, SocketAddr};

use axum::http::HeaderMap;
use ipnet::IpNet;

/// Where proxies write down whom they speak for, each adding its own peer at the end.
const FORWARDED_FOR: &str = "x-forwarded-for";

/// The address of a request's client. A header is believed as far as trusted proxies have written it: anybody can send one.
pub fn client(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> IpAddr {
    let is_trusted = |address: &IpAddr| trusted.iter().any(|network| network.contains(address));
    let mut client = peer.to_canonical();
    if trusted.is_empty() {
        return client;
    }
    let lines = headers.get_all(FORWARDED_FOR).iter().rev();
    let mut before =
        lines.flat_map(|line| line.to_str().unwrap_or_default().rsplit(',').map(|entry| address(entry.trim())));
    while is_trusted(&client) {
        match before.next() {
            Some(Some(address)) => client = address,
            // Something that is no address tells nothing about what stands before it.
            Some(None) | None => break,
        }
    }
    client
}

/// An address, perhaps with a port.
fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().or_else(|_| text.parse::<SocketAddr>().map(|address| address.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// One client as a token of a subject. Who has an IPv6 address has a whole /64 of them.
pub fn token(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => format!("v4-{}", address.to_string().replace('.', "-")),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            format!("v6-{a:x}-{b:x}-{c:x}-{d:x}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(peer: &str, forwarded: &[&str], trusted: &[&str]) -> String {
        let mut headers = HeaderMap::new();
        for line in forwarded {
            headers.append(FORWARDED_FOR, line.parse().unwrap());
        }
        let trusted: Vec<IpNet> = trusted.iter().map(|network| network.parse().unwrap()).collect();
        client(peer.parse().unwrap(), &headers, &trusted).to_string()
    }

    #[test]
    fn only_trusted_proxies_are_believed() {
        let ours = &["10.0.0.0/8", "fd00::/8"];
        for (peer, forwarded, trusted, expected) in [
            ("192.0.2.1", &["203.0.113.9"][..], &[][..], "192.0.2.1"),
            ("192.0.2.1", &["203.0.113.9"], ours, "192.0.2.1"),
            ("10.0.0.1", &["203.0.113.9"], ours, "203.0.113.9"),
            ("10.0.0.1", &[], ours, "10.0.0.1"),
            // The left end is what the client wrote himself.
            ("10.0.0.1", &["198.51.100.7, 203.0.113.9"], ours, "203.0.113.9"),
            ("10.0.0.1", &["10.6.6.6, 203.0.113.9, 10.0.0.2"], ours, "203.0.113.9"),
            ("10.0.0.1", &["198.51.100.7", "203.0.113.9, 10.0.0.2"], ours, "203.0.113.9"),
            ("10.0.0.1", &["203.0.113.9:4711"], ours, "203.0.113.9"),
            ("10.0.0.1", &["[2001:db8::1]:4711"], ours, "2001:db8::1"),
            ("10.0.0.1", &["[2001:db8::1]"], ours, "2001:db8::1"),
            ("10.0.0.1", &["203.0.113.9, unknown"], ours, "10.0.0.1"),
            ("10.0.0.1", &["203.0.113.9, unknown, 10.0.0.2"], ours, "10.0.0.2"),
            ("10.0.0.1", &["10.0.0.3"], ours, "10.0.0.3"),
            ("::ffff:10.0.0.1", &["::ffff:203.0.113.9"], ours, "203.0.113.9"),
            ("fd00::1", &["2001:db8::1"], ours, "2001:db8::1"),
        ] {
            assert_eq!(seen(peer, forwarded, trusted), expected, "{peer} {forwarded:?}");
        }
    }

    #[test]
    fn a_client_is_one_token_and_an_ipv6_network_is_one_client() {
        let token = |text: &str| super::token(text.parse().unwrap());
        assert_eq!(token("192.0.2.1"), "v4-192-0-2-1");
        assert_eq!(token("2001:db8:0:7::1"), token("2001:db8:0:7:ffff::2"));
        assert_ne!(token("2001:db8:0:7::1"), token("2001:db8:0:8::1"));
    }
}
