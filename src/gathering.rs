//! Gathering: whoever waits at the same time shares one write, and it may pay to wait a moment for more.
//!
//! Callers that ask again as soon as they are answered come in a crowd. Whoever goes at once, with the few that came during
//! the last write, lets the crowd wait for a write of its own: two in turns. Waiting until it is back makes one of them. That is
//! faster where a write takes longer than the way to the callers and back, and slower where it does not, because nothing is
//! written meanwhile. Disk, network and callers decide, so now and then the other way is tried for a while. Groups wait unless
//! that answers fewer callers in the same time.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

/// So many make a crowd. Fewer are not worth waiting for.
const CROWD: usize = 8;

/// Nobody is waited for longer, however long a write takes.
const LONGEST: Duration = Duration::from_millis(20);

/// What the runtime's timers can tell apart, and so the shortest pause that is one: writes may be much quicker.
const TICK: Duration = Duration::from_millis(1);

/// A queue from which all who wait are taken together. Those who were taken before must be answered by then.
pub struct Gathering<T> {
    queue: mpsc::Receiver<T>,
    /// The most of one group.
    most: usize,
    last: Option<Group>,
    pace: Pace,
}

/// What was taken together, and how that went.
struct Group {
    size: usize,
    /// How long was waited for the last of them.
    waited: Duration,
    taken: Instant,
    answered: Option<Answered>,
}

struct Answered {
    at: Instant,
    /// Who was about: they were answered just then, or had come meanwhile.
    about: usize,
}

impl<T> Gathering<T> {
    pub fn new(queue: mpsc::Receiver<T>, most: usize) -> Self {
        Self { queue, most, last: None, pace: Pace::default() }
    }

    /// Takes who is there, as soon as there is anybody. Nothing is lost if this is not waited for to its end. 0 if nobody can
    /// come any more.
    pub async fn first(&mut self, into: &mut Vec<T>) -> usize {
        if let Some(group) = &mut self.last {
            let about = (group.size + self.queue.len()).min(self.most);
            group.answered.get_or_insert_with(|| Answered { at: Instant::now(), about });
        }
        self.queue.recv_many(into, self.most).await
    }

    /// Takes who comes in the next moment, where it pays to wait. This must be waited for to its end.
    pub async fn rest(&mut self, into: &mut Vec<T>) {
        let began = Instant::now();
        if let Some(Group { size, waited, taken, answered: Some(Answered { at, about }) }) = self.last.take() {
            let (took, idle) = (at - taken, began - at);
            if idle > 8 * took.max(TICK) {
                self.pace.interrupt();
            } else if about >= CROWD {
                self.pace.add(size, waited + took + idle);
                if self.pace.waits() {
                    // But for the last few of them.
                    self.fill(into, about - about / 8, took.min(LONGEST)).await;
                }
            }
        }
        let taken = Instant::now();
        self.last = Some(Group { size: into.len(), waited: taken - began, taken, answered: None });
    }

    async fn fill(&mut self, into: &mut Vec<T>, enough: usize, longest: Duration) {
        let fill =
            async { while into.len() < enough && self.queue.recv_many(into, self.most - into.len()).await > 0 {} };
        // Whoever is not back by then is not waited for.
        let _ = timeout(longest, fill).await;
    }

    /// Lets nobody in any more. Who waits already is still taken.
    pub fn close(&mut self) {
        self.queue.close();
    }
}

/// Whether groups wait. Rates vary by a tenth from one moment to the next, so what is learned is the mean of many tries, each
/// against the moment before it.
struct Pace {
    /// How much faster it was to wait.
    gain: f64,
    /// As many as the gain is a mean of.
    tries: u32,
    /// Whether this stretch is in the way that is not thought to be the better one.
    is_try: bool,
    /// Stretches until the next try.
    left: u32,
    stretch: Stretch,
    /// Callers answered a second in the stretch before this one.
    rate: f64,
}

/// Groups one after the other, all in the same way.
#[derive(Default)]
struct Stretch {
    groups: u32,
    callers: usize,
    time: Duration,
}

impl Pace {
    const GROUPS: u32 = 64;
    /// From one try to the next. The first ones follow each other.
    const APART: u32 = 8;
    /// Older tries are forgotten.
    const REMEMBERED: u32 = 16;
    /// No try counts for more, so that a stall decides nothing.
    const MOST: f64 = 1.25;
    /// Waiting may be worse by this: it saves writes, and there is noise.
    const WORTH: f64 = 0.97;

    fn waits(&self) -> bool {
        (self.gain > Self::WORTH) != self.is_try
    }

    /// A group, and how long it took from the first of it to the first of the next one.
    fn add(&mut self, callers: usize, time: Duration) {
        self.stretch.groups += 1;
        self.stretch.callers += callers;
        self.stretch.time += time;
        if self.stretch.groups == Self::GROUPS {
            let stretch = std::mem::take(&mut self.stretch);
            self.judge(stretch.callers as f64 / stretch.time.as_secs_f64());
        }
    }

    fn judge(&mut self, rate: f64) {
        let before = std::mem::replace(&mut self.rate, rate);
        if self.is_try {
            let gain = if self.waits() { rate / before } else { before / rate };
            self.tries = (self.tries + 1).min(Self::REMEMBERED);
            self.gain += (gain.clamp(1.0 / Self::MOST, Self::MOST) - self.gain) / f64::from(self.tries);
            (self.is_try, self.left) = (false, if self.tries < Self::APART { 1 } else { Self::APART });
        } else {
            self.left -= 1;
            self.is_try = self.left == 0;
        }
    }

    /// Nobody was about for a while. What pays shows under load, and the next load may be another.
    fn interrupt(&mut self) {
        self.stretch = Stretch::default();
        if self.is_try {
            (self.is_try, self.left) = (false, 1);
        }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self { gain: 1.0, tries: 0, is_try: false, left: 1, stretch: Stretch::default(), rate: 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{sync::oneshot, task::JoinSet, time::sleep};

    use super::*;

    type Asked = oneshot::Sender<()>;

    const MILLISECOND: Duration = Duration::from_millis(1);

    /// How many answers callers get within some seconds who ask again after a way of their own, from a store whose writes
    /// take as long as is said. In tokio's time, which jumps.
    async fn answered(callers: u32, way: impl Fn(u32) -> Duration, write: Duration, adjust: impl Fn(&mut Pace)) -> u32 {
        let (ask, queue) = mpsc::channel::<Asked>(100);
        let mut gathering = Gathering::new(queue, 1000);
        adjust(&mut gathering.pace);
        tokio::spawn(async move {
            let mut group = Vec::new();
            while gathering.first(&mut group).await > 0 {
                gathering.rest(&mut group).await;
                sleep(write).await;
                group.drain(..).for_each(|asked| asked.send(()).unwrap());
            }
        });
        let end = Instant::now() + Duration::from_secs(100);
        let mut asking = JoinSet::new();
        for caller in 0..callers {
            let (ask, way) = (ask.clone(), way(caller));
            asking.spawn(async move {
                let mut answers = 0;
                while Instant::now() < end {
                    sleep(way).await;
                    let (reply, answer) = oneshot::channel();
                    ask.send(reply).await.unwrap();
                    answer.await.unwrap();
                    answers += 1;
                }
                answers
            });
        }
        asking.join_all().await.into_iter().sum()
    }

    fn never(pace: &mut Pace) {
        (pace.gain, pace.left) = (0.0, u32::MAX);
    }

    fn always(pace: &mut Pace) {
        (pace.gain, pace.left) = (2.0, u32::MAX);
    }

    fn as_it_is(_: &mut Pace) {}

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_is_back_before_another_write_would_be_done_is_waited_for() {
        let way = |caller| MILLISECOND * (1 + caller % 5);
        let (at_once, waiting) =
            (answered(64, way, 15 * MILLISECOND, never).await, answered(64, way, 15 * MILLISECOND, as_it_is).await);
        assert!(f64::from(waiting) > 1.3 * f64::from(at_once), "{waiting} answers, and {at_once} without waiting");
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_is_far_is_not() {
        let (way, write) = (|caller| MILLISECOND * (10 + caller), 10 * MILLISECOND);
        let (at_once, waiting) = (answered(64, way, write, never).await, answered(64, way, write, as_it_is).await);
        assert!(f64::from(waiting) > 0.96 * f64::from(at_once), "{waiting} answers, and {at_once} without waiting");
        let always = answered(64, way, write, always).await;
        assert!(f64::from(always) < 0.9 * f64::from(at_once), "{always} answers, and {at_once} without waiting");
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_callers_never_wait_for_each_other() {
        let way = |caller| MILLISECOND * (1 + caller);
        let at_once = answered(7, way, 5 * MILLISECOND, never).await;
        assert_eq!(answered(7, way, 5 * MILLISECOND, as_it_is).await, at_once);
    }

    /// A queue whose last group was a crowd, with waiting in force.
    async fn after_a_crowd(write: Duration) -> (mpsc::Sender<u32>, Gathering<u32>) {
        let (ask, queue) = mpsc::channel(100);
        let mut gathering = Gathering::new(queue, 100);
        gathering.pace.gain = 2.0;
        (0..50).for_each(|asked| ask.try_send(asked).unwrap());
        let mut crowd = Vec::new();
        gathering.first(&mut crowd).await;
        gathering.rest(&mut crowd).await;
        sleep(write).await;
        (ask, gathering)
    }

    /// How long the next one waits who comes after a pause.
    async fn wait(gathering: &mut Gathering<u32>, ask: &mpsc::Sender<u32>, pause: Duration) -> Duration {
        let mut group = Vec::new();
        // Nobody is there yet.
        assert!(timeout(pause, gathering.first(&mut group)).await.is_err());
        ask.try_send(1).unwrap();
        let came = Instant::now();
        assert_eq!(gathering.first(&mut group).await, 1);
        gathering.rest(&mut group).await;
        assert_eq!(group, [1]);
        came.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_does_not_come_back_is_waited_for_once_and_not_long() {
        for (write, longest) in [(5, 5), (20, 20), (5000, 20)] {
            let (ask, mut gathering) = after_a_crowd(MILLISECOND * write).await;
            let waited = wait(&mut gathering, &ask, MILLISECOND).await;
            assert!(
                (MILLISECOND * longest..=MILLISECOND * (longest + 1)).contains(&waited),
                "{waited:?} after {write} ms"
            );
            assert!(wait(&mut gathering, &ask, MILLISECOND).await.is_zero());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_crowd_of_long_ago() {
        let (ask, mut gathering) = after_a_crowd(5 * MILLISECOND).await;
        assert!(wait(&mut gathering, &ask, 41 * MILLISECOND).await.is_zero());
    }

    /// Feeds stretches, with a group's time if it waits and if it does not, and tells how many of them waited.
    fn stretches(pace: &mut Pace, count: u32, waiting: Duration, going: Duration) -> u32 {
        let one = |_| {
            let waits = pace.waits();
            (0..Pace::GROUPS).for_each(|_| pace.add(50, if waits { waiting } else { going }));
            u32::from(waits)
        };
        (0..count).map(one).sum()
    }

    #[test]
    fn a_try_ends_with_the_load() {
        let mut pace = Pace::default();
        stretches(&mut pace, 1, MILLISECOND, MILLISECOND);
        assert!(!pace.waits());
        pace.interrupt();
        assert!(pace.waits());
        stretches(&mut pace, 1, MILLISECOND, MILLISECOND);
        assert!(!pace.waits(), "and comes again after a stretch of the new load");
    }

    #[test]
    fn what_pays_is_done_but_for_a_try_in_nine() {
        let mut pace = Pace::default();
        stretches(&mut pace, 200, 10 * MILLISECOND, 10 * MILLISECOND);
        assert_eq!(stretches(&mut pace, 90, 10 * MILLISECOND, 10 * MILLISECOND), 80, "it saves writes");
        stretches(&mut pace, 300, 11 * MILLISECOND, 10 * MILLISECOND);
        assert_eq!(stretches(&mut pace, 90, 11 * MILLISECOND, 10 * MILLISECOND), 10);
        stretches(&mut pace, 300, 10 * MILLISECOND, 11 * MILLISECOND);
        assert_eq!(stretches(&mut pace, 90, 10 * MILLISECOND, 11 * MILLISECOND), 80);
    }

    #[test]
    fn a_stall_decides_nothing() {
        for (waiting, waits) in [(10, 80), (11, 80), (12, 10)] {
            for when in 0..9 {
                let mut pace = Pace::default();
                stretches(&mut pace, 300 + when, waiting * MILLISECOND, 11 * MILLISECOND);
                pace.add(50, Duration::from_secs(10));
                stretches(&mut pace, 8, waiting * MILLISECOND, 11 * MILLISECOND);
                assert_eq!(stretches(&mut pace, 90, waiting * MILLISECOND, 11 * MILLISECOND), waits);
            }
        }
    }

    #[tokio::test]
    async fn who_came_before_it_closed_is_taken_and_nobody_after() {
        let (ask, queue) = mpsc::channel(10);
        let mut gathering = Gathering::new(queue, 2);
        let mut group = Vec::new();
        (1..=3).for_each(|asked| ask.try_send(asked).unwrap());
        assert_eq!((gathering.first(&mut group).await, group.as_slice()), (2, [1, 2].as_slice()));
        gathering.close();
        assert!(ask.try_send(4).is_err());
        assert_eq!((gathering.first(&mut group).await, group.as_slice()), (1, [1, 2, 3].as_slice()));
        assert_eq!(gathering.first(&mut group).await, 0);
    }
}
