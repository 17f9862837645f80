// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/wire"
)

// Engine is one participant: its backends, its regions and its peers.
type Engine struct {
	cfg   Config
	id    wire.ID
	host  wire.ID
	born  time.Time // base of the monotonic clock of the hot path
	lanes []*lane   // of Config.Backends; last, the stager's

	stager *stager
	meets  session.StreamPolicy

	mu      sync.Mutex // guards the fields below; never held across a backend's call that may block
	closed  bool
	regions map[string]*Region
	peers   map[*Peer]struct{}
	places  int // in peers, for those that connect now
	private int // of peers
	self    *Peer

	localSelf *Peer // see local
	leases    map[*Lease]struct{}
	tickets   map[wire.Secret]*ticket
	guests    guests

	lastPeer     uint64 // guarded by mu
	peersVersion atomic.Uint64

	slots      slots
	sweeper    sweeper
	schedule   *scheduler // nil: none
	inbox      chan Notification
	inboxed    inboxBytes
	reassembly reassembly
	pace       pace
	dropped    atomic.Uint64 // completions that no transfer waited for
	left       atomic.Int64  // messages of Notify that nobody waits for any more

	life      context.Context // ends as Close begins
	endLife   context.CancelFunc
	closing   chan struct{} // closed when all that peers reach is closed
	closeOnce sync.Once
	closeErr  error          // of the one Close
	running   sync.WaitGroup // goroutines that end with the engine
}

// Open starts an engine. It owns the backends from here on, also when it fails.
func Open(cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, errors.Join(err, closeBackends(cfg.Backends))
	}
	e := &Engine{
		cfg: cfg, meets: session.StreamPolicy{Identity: cfg.Identity, Plaintext: cfg.Plaintext},
		host: hostID(), born: time.Now(),
		regions: map[string]*Region{}, peers: map[*Peer]struct{}{},
		leases:  map[*Lease]struct{}{},
		tickets: map[wire.Secret]*ticket{}, guests: guests{
			peers: session.HostCount{Most: cfg.PeersMax},
			bytes: session.HostCount{Most: descriptionsMax * cfg.DescriptionMax}},
		reassembly: reassembly{most: cfg.NotificationBytes},
		inbox:      make(chan Notification, cfg.NotificationsMax), closing: make(chan struct{}),
	}
	rand.Read(e.id[:])
	e.peersVersion.Store(1)
	e.life, e.endLife = context.WithCancel(context.Background())
	e.slots.init(cfg.TransfersMax)
	e.sweeper.init(e)
	e.schedule = newScheduler(e, cfg.Schedule)
	for i, b := range cfg.Backends {
		l := &lane{e: e, index: i, b: b, caps: b.Caps(), kick: make(chan struct{}, 1)}
		switch {
		case l.caps.DescsMax < 1:
			err = errors.New("its Caps.DescsMax is below 1")
		case l.notifies() && l.caps.MessageMax < messageMin:
			err = fmt.Errorf("its Caps.MessageMax of %d is below %d", l.caps.MessageMax, messageMin)
		default:
			// of a backend that another engine has closed, FD may be a number of other use
			if _, err = b.Poll(make([]driver.Completion, 1)); err == nil {
				l.wake, err = proc.EventFromFD(b.FD())
			}
		}
		if err != nil {
			for _, opened := range e.lanes {
				opened.close()
			}
			e.endLife()
			return nil, errors.Join(&OpError{Op: "open", Backend: l.caps.Name, Err: err},
				closeBackends(cfg.Backends))
		}
		e.lanes = append(e.lanes, l)
	}
	e.addStager()
	for _, l := range e.lanes[:len(cfg.Backends)] {
		if b, ok := l.b.(driver.Reaper); ok {
			b.Reap(l.handOver)
		}
		e.running.Go(l.serve)
	}
	if e.schedule != nil {
		e.running.Go(e.schedule.serve)
	}
	return e, nil
}

// Name returns Config.Name.
func (e *Engine) Name() string { return e.cfg.Name }

// now is the time since Open: monotonic, cheap, and small enough to store in one
// atomic word.
func (e *Engine) now() time.Duration { return time.Since(e.born) }

// Limits of names in use are reported with what to do about them.
func fullError(what string, limit int, field string) error {
	return fmt.Errorf("%d %s are in use: close some or raise Config.%s: %w", limit, what, field,
		ErrFull)
}

// hostID is the same in every process that runs under this kernel since its
// start. Whether two of them can really share memory (namespaces may part them)
// is found out by connecting.
var hostID = sync.OnceValue(func() (id wire.ID) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		rand.Read(id[:]) // unknown: then no other engine is on this host
		return id
	}
	sum := sha256.Sum256(append([]byte("sluice host "), boot...))
	copy(id[:], sum[:])
	return id
})

// Close ends the transfers (ErrClosed), revokes the leases, and closes peers,
// regions and backends. It is idempotent, waits for a Close that runs already, and
// is bounded by AbortGrace and by what the backends promise. Each call returns what the first did:
// ErrUnproven when bytes may land still in a region.
func (e *Engine) Close() error {
	e.closeOnce.Do(func() { e.closeErr = e.close() })
	return e.closeErr
}

func (e *Engine) close() error {
	e.mu.Lock()
	e.closed = true // nothing is added to the sets from here on
	peers, leases := slices.Collect(maps.Keys(e.peers)), slices.Collect(maps.Keys(e.leases))
	regions := slices.DeleteFunc(slices.Collect(maps.Values(e.regions)), func(r *Region) bool {
		return r.mems == nil // Register sees that we close
	})
	e.mu.Unlock()
	e.endLife()
	e.stager.drain()

	errs := []error{
		inParallel(peers, (*Peer).Close),
		inParallel(leases, func(l *Lease) error { return unrevoked(l.end(e.cfg.AbortGrace)) }),
		inParallel(regions, func(r *Region) error { return unrevoked(r.release(true)) }),
	}
	close(e.closing)
	for _, l := range e.lanes {
		l.close()
	}
	errs = append(errs, e.stager.Close(), closeBackends(e.cfg.Backends))
	e.sweeper.stop()

	// The completions that the backends had left. A transfer without one by then, against all
	// promises, is given up: its waiters must not outlive the engine.
	for end := e.now() + e.cfg.AbortGrace; ; time.Sleep(time.Millisecond) {
		for _, l := range e.lanes {
			l.poll()
		}
		if e.slots.posted() == 0 || e.now() > end {
			break
		}
	}
	for i := range e.slots.live {
		t := e.slots.live[i].Load()
		if t == nil {
			continue
		}
		if generation, ok := t.pin(); ok {
			t.fail(generation, ErrClosed)
			t.abandon(generation)
			t.unpin()
		}
	}
	e.running.Wait()
	return errors.Join(append(errs, e.slots.proof())...)
}

// unrevoked says of a Revoke that failed, also by its time, that bytes may land still.
func unrevoked(err error) error {
	if err == nil || errors.Is(err, ErrUnproven) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnproven, err)
}

// closersMax is how many peers, leases or regions Close ends at once, so that a
// frozen peer here and there does not add up.
const closersMax = 64

func inParallel[T any](list []T, end func(T) error) error {
	errs := make([]error, len(list))
	places := make(chan struct{}, closersMax)
	var all sync.WaitGroup
	for i, v := range list {
		places <- struct{}{}
		all.Go(func() {
			errs[i] = end(v)
			<-places
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func closeBackends(list []driver.Backend) error {
	var errs []error
	for _, b := range list {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}
