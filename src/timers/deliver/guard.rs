//! Which addresses HTTP callbacks may reach. Asked after the name was resolved and before the connection is made, so that
//! no name can lead to our neighbours, whatever it resolved to a moment before.

use std::{
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use http::Uri;
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use tokio::net::{TcpStream, lookup_host};
use tower_service::Service;

/// Connects to public addresses, and to those that the configuration opens.
#[derive(Clone)]
pub struct Guarded {
    allowed: Arc<[IpNet]>,
    lookups: Arc<Lookups>,
}

/// Names that are being looked up. The system does that on threads of which there are not many, so all who wait for a name
/// share one: a name that is slow to resolve holds up nobody but those who call it.
#[derive(Default)]
struct Lookups(Mutex<HashMap<(String, u16), Lookup>>);

type Lookup = Shared<BoxFuture<'static, Result<Arc<[SocketAddr]>, Arc<str>>>>;

impl Lookups {
    async fn addresses(&self, host: &str, port: u16) -> Result<Arc<[SocketAddr]>, Arc<str>> {
        let name = (host.to_owned(), port);
        let lookup = {
            let mut under_way = self.0.lock().expect("no panic while names are held");
            let begin = || look_up(name.clone()).boxed().shared();
            under_way.entry(name.clone()).or_insert_with(begin).clone()
        };
        let found = lookup.clone().await;
        // Whoever comes later asks anew: names change.
        let mut under_way = self.0.lock().expect("no panic while names are held");
        if under_way.get(&name).is_some_and(|known| known.ptr_eq(&lookup)) {
            under_way.remove(&name);
        }
        found
    }
}

async fn look_up((host, port): (String, u16)) -> Result<Arc<[SocketAddr]>, Arc<str>> {
    match lookup_host((host.as_str(), port)).await {
        Ok(found) => Ok(found.collect()),
        Err(error) => Err(error.to_string().into()),
    }
}

impl Guarded {
    pub fn new(allowed: &[IpNet]) -> Self {
        Self { allowed: allowed.into(), lookups: Arc::default() }
    }

    fn admits(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.allowed.iter().any(|network| network.contains(&address)) || is_public(address)
    }

    async fn connect(self, uri: Uri) -> io::Result<TcpStream> {
        let host = uri.host().ok_or_else(|| io::Error::other("the URL has no host"))?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
        let found = self.lookups.addresses(bare, port).await.map_err(|problem| io::Error::other(&*problem))?;
        let admitted = found.iter().filter(|address| self.admits(address.ip()));
        // Where the name leads is nobody's business.
        let refused = format!("{host} has no public address, and none that timers.allow_networks opens");
        let mut failed = io::Error::new(io::ErrorKind::PermissionDenied, refused);
        for address in admitted {
            match TcpStream::connect(address).await {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}

impl Service<Uri> for Guarded {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.clone().connect(uri);
        Box::pin(async move { connecting.await.map(TokioIo::new) })
    }
}

/// Whether an address belongs to the public internet.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240
        // Shared by carriers, protocol assignments, benchmarks, the old 6to4 relays.
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19))
        || (a == 192 && b == 88 && c == 99)
        // The metadata of a cloud that keeps it at a public address.
        || address == Ipv4Addr::new(168, 63, 129, 16);
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let [a, b, ..] = segments;
    // Addresses that carry one of version 4 lead where that one leads.
    let low = || Ipv4Addr::from(((u32::from(segments[6])) << 16) | u32::from(segments[7]));
    match segments {
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => return is_public_v4(low()),
        [0x2002, high, lower, ..] => {
            return is_public_v4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(lower)));
        }
        [0, 0, 0, 0, 0, 0, _, _] => return false,
        _ => {}
    }
    // Only 2000::/3 is given out; of that, not the special ranges (Teredo, benchmarks, documentation and their like).
    (a & 0xe000) == 0x2000 && !(a == 0x2001 && b < 0x0200) && !(a == 0x2001 && b == 0x0db8) && a != 0x3fff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_addresses_are_not_public() {
        for public in ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::8.8.8.8"] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for special in [
            "127.0.0.1",
            "127.9.9.9",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "168.63.129.16",
            "100.64.0.1",
            "0.0.0.0",
            "0.1.2.3",
            "255.255.255.255",
            "224.0.0.1",
            "240.0.0.1",
            "192.0.2.1",
            "192.0.0.1",
            "198.18.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "2001:db8::1",
            "2001::1",
            "64:ff9b::127.0.0.1",
            "2002:7f00:1::",
            "2002:a00:1::",
            "fec0::1",
            "::127.0.0.1",
            "100::1",
            "3fff::1",
        ] {
            assert!(!is_public(special.parse().unwrap()), "{special}");
        }
    }

    #[test]
    fn what_the_configuration_opens_is_admitted_and_mapped_addresses_are_what_they_map() {
        let guard = Guarded::new(&["127.0.0.0/8".parse().unwrap(), "fd00::/16".parse().unwrap()]);
        for (address, admitted) in [
            ("127.0.0.1", true),
            ("::ffff:127.0.0.1", true),
            ("fd00::1", true),
            ("::1", false),
            ("::ffff:10.0.0.1", false),
            ("::ffff:8.8.8.8", true),
            ("10.0.0.1", false),
        ] {
            assert_eq!(guard.admits(address.parse().unwrap()), admitted, "{address}");
        }
    }

    /// A guard for which the next lookup of a name has this answer.
    fn told(guard: &Guarded, answer: &[SocketAddr]) {
        let answer: Result<Arc<[SocketAddr]>, Arc<str>> = Ok(answer.into());
        let lookup = std::future::ready(answer).boxed().shared();
        guard.lookups.0.lock().unwrap().insert(("rebound.example".to_owned(), 80), lookup);
    }

    #[tokio::test]
    async fn a_name_that_leads_elsewhere_a_moment_later_is_checked_where_it_leads() {
        let ours = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let neighbour = tokio::net::TcpListener::bind(("127.0.0.2", 0)).await.unwrap();
        let (open, closed) = (ours.local_addr().unwrap(), neighbour.local_addr().unwrap());
        let guard = Guarded::new(&["127.0.0.1/32".parse().unwrap()]);
        let connect = || guard.clone().connect("http://rebound.example/".parse().unwrap());
        told(&guard, &[open]);
        assert_eq!(connect().await.unwrap().peer_addr().unwrap(), open);
        // Rebound: the same name, another answer.
        told(&guard, &[closed]);
        assert_eq!(connect().await.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // Hidden behind one that is open.
        told(&guard, &[closed, open]);
        assert_eq!(connect().await.unwrap().peer_addr().unwrap(), open);
        let knocked = tokio::time::timeout(std::time::Duration::from_millis(10), neighbour.accept()).await;
        assert!(knocked.is_err(), "the neighbour was called");
    }
}
