// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// firstTag has high and low bits set, so that checks fail over a backend that keeps a part of a tag
// alone, or uses a tag as a pointer or an index.
const firstTag = 0xfedc_ba98_0000_0001

// errLate says that a wait reached its limit.
var errLate = errors.New("nothing happened within the limit")

// host is a backend with its memory and its peers. It lives in the test's process or in the second
// one, and executes the requests of checks in either. All its waits poll the backend, and each
// completion and message is checked against "each accepted tag completes exactly once" and "one
// last message of each connection".
type host struct {
	harness *Harness
	b       driver.Backend

	polling, receiving sync.Mutex // Poll never runs twice at once, and neither does Receive

	mu       sync.Mutex     // guards what follows
	tags     []outcome      // by tag-firstTag
	open     int            // tags in flight
	breaches []string       // broken promises
	ended    map[uint64]int // by connection: 1 after its last message; -1: we made it, none comes
	spaces   []*Space
	regions  []*region
	peers    []driver.Peer
	task     *task
	stuck    bool          // a call of the backend has not returned: memory must not be freed
	spot     string        // a point in the backend's code at which park stops a goroutine
	arrived  chan struct{} // closed once a goroutine is stopped there
	goOn     chan struct{} // closed by proceed: the goroutine continues
}

type outcome struct {
	refused, completed bool // neither: it is in flight
	err                error
}

// region is one registration.
type region struct {
	seg driver.Segment
	mem driver.Memory
}

// task is a goroutine that runs while the host executes further requests.
type task struct {
	stop, done chan struct{}
	err        error
}

func newHost(h *Harness) (*host, error) {
	b, err := h.New()
	if err != nil {
		return nil, err
	}
	return &host{harness: h, b: b, ended: map[uint64]int{}}, nil
}

// breach notes a broken promise. The caller holds mu.
func (h *host) breach(format string, args ...any) {
	if len(h.breaches) < 20 {
		h.breaches = append(h.breaches, testkit.BrokenPromise+fmt.Sprintf(format, args...))
	}
}

// allocate makes memory of a kind: local, shared, or memory that a check spoils later (spoilable).
func (h *host) allocate(kind string, n uint64) (id int, err error) {
	var s *Space
	switch kind {
	case "local":
		s, err = h.harness.Local(n)
	case "shared":
		s, err = h.harness.Remote(n)
	default:
		s, err = spoilable(n, kind)
	}
	if err != nil {
		return 0, fmt.Errorf("allocate %d bytes: %w", n, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.spaces = append(h.spaces, s)
	return len(h.spaces) - 1, nil
}

// register makes a range of a space known.
func (h *host) register(q *request) (id int, err error) {
	seg, err := h.spaces[q.ID].Segment.Slice(q.Off, q.Len, secret())
	if err != nil {
		return 0, err
	}
	seg.ReadOnly, seg.Only = q.ReadOnly, q.Only
	m, err := h.b.Register(seg)
	if err != nil {
		return 0, fmt.Errorf("register: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.regions = append(h.regions, &region{seg, m})
	return len(h.regions) - 1, nil
}

func secret() (s [16]byte) {
	_, _ = rand.Read(s[:]) // never fails
	return s
}

func (h *host) region(id int) *region {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.regions[id]
}

func (h *host) peer(id int) driver.Peer {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.peers[id]
}

func (h *host) space(id int) *Space {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.spaces[id]
}

// free gives a space back.
func (h *host) free(id int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	free := h.spaces[id].Free
	h.spaces[id].Free = nil
	if free == nil || h.stuck {
		return nil
	}
	return free()
}

func (h *host) connect(addr []byte, limit time.Duration) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p, err := h.b.Connect(ctx, addr)
	if err != nil {
		return 0, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch conn := p.Conn(); {
	case (conn == 0) != (p.Can()&driver.CanNotify == 0):
		h.breach("Peer.Conn is %d, and Can is %b", conn, p.Can())
	case conn != 0 && h.ended[conn] != 0:
		h.breach("Peer.Conn of a new Peer is %d, a number that this backend has used before", conn)
	case conn != 0:
		h.ended[conn] = -1 // ours: it has no last message
	}
	h.peers = append(h.peers, p)
	return len(h.peers) - 1, nil
}

// submitOnce calls Submit once, with a new tag, and returns that tag.
func (h *host) submitOnce(p driver.Peer, b *driver.Batch) (tag uint64, err error) {
	h.mu.Lock() // before Submit, since the completion may be there before that returns
	tag = firstTag + uint64(len(h.tags))
	h.tags = append(h.tags, outcome{})
	h.open++
	h.mu.Unlock()
	if err = p.Submit(tag, b); err == nil {
		return tag, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if o := &h.tags[tag-firstTag]; o.completed {
		h.breach("tag %#x completed (%v) although Submit had refused it", tag, o.err)
	} else {
		o.refused = true
		h.open--
	}
	return tag, err
}

// submit submits a batch as the engine does: where the backend is full it polls and tries again.
func (h *host) submit(p driver.Peer, b *driver.Batch) (tag uint64, err error) {
	for wait := newWait(h.harness.limit); ; {
		tag, err = h.submitOnce(p, b)
		if !errors.Is(err, driver.ErrFull) {
			return tag, err
		}
		if _, err := h.poll(); err != nil {
			return 0, err
		}
		if !wait.more() {
			return 0, fmt.Errorf("submit while the backend is full: %w", errLate)
		}
	}
}

// poll takes the completions that are ready, and returns how many. It returns 0 at once while
// another goroutine polls.
func (h *host) poll() (int, error) {
	if !h.polling.TryLock() {
		return 0, nil
	}
	defer h.polling.Unlock()
	var done [64]driver.Completion
	n, err := h.b.Poll(done[:])
	if n < 0 || n > len(done) {
		return 0, fmt.Errorf("Poll returned %d for %d places", n, len(done))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range done[:n] {
		i := c.Tag - firstTag
		if i >= uint64(len(h.tags)) {
			h.breach("a completion (%v) of tag %#x, which was not submitted", c.Err, c.Tag)
			continue
		}
		switch o := &h.tags[i]; {
		case o.completed:
			h.breach("tag %#x completed twice: first %v, then %v", c.Tag, o.err, c.Err)
		case o.refused:
			h.breach("tag %#x completed (%v) although Submit had refused it", c.Tag, c.Err)
		default:
			o.completed, o.err = true, c.Err
			h.open--
		}
	}
	return n, err
}

// outcome reports whether the batch of a tag has completed, and with which error.
func (h *host) outcome(tag uint64) (done bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o := h.tags[tag-firstTag]
	return o.completed, o.err
}

// await polls until the tag has completed, and returns its error, or errLate.
func (h *host) await(tag uint64) error {
	for wait := newWait(h.harness.limit); ; {
		if done, err := h.outcome(tag); done {
			return err
		}
		n, err := h.poll()
		if err != nil {
			if done, err := h.outcome(tag); done {
				return err
			}
			return fmt.Errorf("tag %#x never completes, and Poll returns %v: %w", tag, err, errLate)
		}
		if n == 0 && !wait.more() {
			return fmt.Errorf("tag %#x never completes: %w", tag, errLate)
		}
	}
}

// sleep waits on the backend's descriptor as the engine does: it calls Arm, and sleeps only if Arm
// says that nothing is ready. Past the limit it returns errLate.
func (h *host) sleep(limit time.Duration) error {
	ready, err := h.b.Arm()
	if err != nil || ready {
		return err
	}
	return h.sleepArmed(limit)
}

func (h *host) sleepArmed(limit time.Duration) error {
	fds := []unix.PollFd{{Fd: int32(h.b.FD()), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); ; {
		n, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("wait for the backend's descriptor: %w", err)
		case n == 0:
			return errLate
		default:
			var count [8]byte
			if _, err := unix.Read(h.b.FD(), count[:]); err != nil && err != unix.EAGAIN {
				return fmt.Errorf("drain the backend's descriptor: %w", err)
			}
			return nil
		}
	}
}

// receiveOnce calls Receive once.
func (h *host) receiveOnce(msgs []driver.Message) (int, error) {
	h.receiving.Lock()
	defer h.receiving.Unlock()
	n, err := h.b.Receive(msgs)
	if n < 0 || n > len(msgs) {
		return 0, fmt.Errorf("Receive returned %d for %d places", n, len(msgs))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range msgs[:n] {
		switch ended := h.ended[m.Conn]; {
		case m.Conn == 0:
			h.breach("a message (%x, %v) has no number of a connection", head(m.Data), m.Err)
		case ended > 0:
			h.breach("connection %d: %x (%v) came behind its last message", m.Conn, head(m.Data),
				m.Err)
		case m.Err != nil && (ended < 0 || m.Data != nil || !errors.Is(m.Err, driver.ErrPeerLost)):
			h.breach("connection %d (ours: %v): last message %x with %v, want no data and %v",
				m.Conn, ended < 0, head(m.Data), m.Err, driver.ErrPeerLost)
		case m.Err != nil:
			h.ended[m.Conn] = 1
		}
	}
	return n, err
}

// receive takes messages until it has count of them, asleep between them or polling. Past the limit
// it returns what it has, with errLate.
func (h *host) receive(count int, limit time.Duration, asleep bool) (got []message, err error) {
	var msgs [16]driver.Message
	for wait := newWait(limit); len(got) < count; {
		n, err := h.receiveOnce(msgs[:min(len(msgs), count-len(got))])
		for _, m := range msgs[:n] {
			got = append(got, h.received(m))
		}
		switch {
		case err != nil:
			return got, err
		case n > 0:
			continue
		case asleep:
			if n, err = h.poll(); err == nil && n == 0 {
				err = h.sleep(limit)
			}
		case !wait.more():
			err = errLate
		}
		if errors.Is(err, errLate) {
			if n, _ := h.receiveOnce(msgs[:1]); n > 0 && asleep {
				return got,
					errors.New("a wake-up was lost: a message came, and the sleeper slept on")
			}
			err = fmt.Errorf("%d of %d messages: %w", len(got), count, errLate)
		}
		if err != nil {
			return got, err
		}
	}
	return got, nil
}

// answer sends one answer, and sleeps while there is no room, as the engine does.
func (h *host) answer(conn uint64, b []byte) error {
	for {
		err := h.b.Answer(conn, b)
		if !errors.Is(err, driver.ErrFull) {
			return err
		}
		if _, err := h.poll(); err != nil {
			return err
		}
		if err := h.sleep(h.harness.limit); err != nil {
			return fmt.Errorf("wait for room for an answer: %w", err)
		}
	}
}

// begin runs f in a goroutine, as the task of the host, until finish.
func (h *host) begin(f func(*task)) {
	t := &task{stop: make(chan struct{}), done: make(chan struct{})}
	h.mu.Lock()
	h.task = t
	h.mu.Unlock()
	go func() {
		defer close(t.done)
		f(t)
	}()
}

// finish waits until the task has ended by itself, or stops it.
func (h *host) finish(stop bool) error {
	h.mu.Lock()
	t := h.task
	h.task = nil
	h.mu.Unlock()
	if t == nil {
		return nil
	}
	if stop {
		close(t.stop)
	}
	select {
	case <-t.done:
		return t.err
	case <-time.After(h.harness.limit):
		return fmt.Errorf("end of what runs beside: %w", errLate)
	}
}

// submitUntil submits batches, with at most that many in flight, until quit is closed or a batch
// fails with an error other than ignored. It returns that error, or errLate if a batch never
// completes. With help it calls Peer.Help for each batch.
func (h *host) submitUntil(p driver.Peer, quit <-chan struct{}, most int, help bool, ignored error,
	next func(seq uint64) *driver.Batch) (err error) {
	var flying []uint64
	for seq := uint64(0); err == nil && !closed(quit); seq++ {
		var tag uint64
		if tag, err = h.submit(p, next(seq)); err == nil {
			flying = append(flying, tag)
			if help {
				p.Help(tag, quit)
			}
		}
		if len(flying) == most {
			err, flying = errors.Join(err, h.await(flying[0])), flying[1:]
		}
		if ignored != nil && errors.Is(err, ignored) {
			err = nil
		}
	}
	for _, tag := range flying {
		if err2 := h.await(tag); err == nil || errors.Is(err2, errLate) {
			err = err2
		}
	}
	return err
}

// flood begins a task: three goroutines, one of which calls Peer.Help, submit a batch over and over
// until each has got an error. ErrRevoked is expected, and gives way to any other error.
func (h *host) flood(p driver.Peer, b *driver.Batch) {
	h.begin(func(t *task) {
		var all sync.WaitGroup
		errs := make([]error, 3)
		for g := range errs {
			all.Go(func() {
				same := func(uint64) *driver.Batch { return b }
				errs[g] = h.submitUntil(p, t.stop, 3, g == 0, nil, same)
			})
		}
		all.Wait()
		for _, err := range errs {
			if t.err == nil || err != nil && !errors.Is(err, driver.ErrRevoked) {
				t.err = err
			}
		}
	})
}

// echo begins a task that sends each message back by the connection that it came by, and sleeps
// until the next one.
func (h *host) echo() {
	h.begin(func(t *task) {
		for !closed(t.stop) {
			got, err := h.receive(1, h.harness.limit, true)
			if err != nil || got[0].Err != nil {
				t.err = err
				return
			}
			if t.err = h.answer(got[0].Conn, got[0].Data); t.err != nil {
				return
			}
		}
	})
}

// park makes the first goroutine of the backend that passes the named spot stop there, until
// proceed.
func (h *host) park(spot string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	arrived, goOn := make(chan struct{}), make(chan struct{})
	h.spot, h.arrived, h.goOn = spot, arrived, goOn
	h.harness.Park(spot, func() {
		close(arrived)
		<-goOn
	})
}

// parked waits until a goroutine has stopped at the spot.
func (h *host) parked() error {
	select {
	case <-h.arrived:
		return nil
	case <-time.After(h.harness.limit):
		return fmt.Errorf("nothing comes to %q: %w", h.spot, errLate)
	}
}

func (h *host) proceed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.goOn != nil {
		h.harness.Park(h.spot, nil)
		close(h.goOn)
		h.goOn = nil
	}
}

// close ends everything, and returns what was wrong.
func (h *host) close() (breaches []string) {
	h.proceed() // a check that failed may have left a goroutine stopped
	if err := h.finish(true); errors.Is(err, errLate) {
		breaches = append(breaches, err.Error())
	}
	if err := within(h.harness.limit, h.b.Close); err != nil {
		h.stuck = errors.Is(err, errLate)
		breaches = append(breaches, fmt.Sprintf("close backend: %v", err))
	}
	for wait := newWait(h.harness.limit); ; {
		n, err := h.poll()
		if errors.Is(err, driver.ErrClosed) {
			break
		}
		if n == 0 && !wait.more() {
			breaches = append(breaches, fmt.Sprintf("Poll after Close: %v, want %v", err,
				driver.ErrClosed))
			break
		}
	}
	for id := range h.spaces {
		if err := h.free(id); err != nil {
			breaches = append(breaches, fmt.Sprintf("free memory: %v", err))
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.open > 0 {
		h.breach("%d of %d tags never completed", h.open, len(h.tags))
	}
	return append(breaches, h.breaches...)
}

// within runs f, and returns its error, or errLate past the limit: f goes on then.
func within(limit time.Duration, f func() error) error {
	result := make(chan error, 1)
	go func() { result <- f() }()
	select {
	case err := <-result:
		return err
	case <-time.After(limit):
		return errLate
	}
}

// wait is a polling loop's pause: it yields for the first 200 µs, then sleeps, until its limit.
type wait struct{ start, end time.Time }

func newWait(limit time.Duration) wait {
	now := time.Now()
	return wait{now, now.Add(limit)}
}

// more waits a little, and reports whether the limit is still ahead.
func (w wait) more() bool {
	now := time.Now()
	if now.Sub(w.start) < 200*time.Microsecond {
		runtime.Gosched()
	} else {
		time.Sleep(20 * time.Microsecond)
	}
	return now.Before(w.end)
}

func stacks() []byte {
	text := make([]byte, 1<<20)
	return text[:runtime.Stack(text, true)]
}
