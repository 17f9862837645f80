// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/ring"
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Backend implements driver.Backend.
type Backend struct {
	cfg     Config
	caps    driver.Caps
	address address
	addr    []byte

	net     fabric // nil: open has not come so far
	event   int    // an eventfd: completions, messages, room
	control *proc.Event

	gate      session.Gate  // held by every call that uses the context
	closing   chan struct{} // closed when Close begins
	closeOnce sync.Once
	closeErr  error
	ended     atomic.Bool // no completion will come any more
	table     session.KeyTable[memory]
	words     session.LastWords[*inbound]
	conns     atomic.Uint64  // numbers of connections that were given out
	turn      atomic.Uint32  // which worker has the next connection
	used      atomic.Int64   // ends
	tasks     session.Tasks  // what takes too long for the control goroutine
	attending sync.WaitGroup // that goroutine, and pulse
	kernel    func() map[netip.Addr]session.Outbound

	mu    sync.Mutex
	peers map[*peer]struct{}

	endsMu   sync.RWMutex
	ends     map[uint64]end         // by what peers put into their messages
	inbounds map[inboundID]*inbound // by what their hello said
	accepted map[uint64]*inbound    // by number

	scratch [64]ring.Done // of Poll
	idle    bool          // the Poll before found nothing; of Poll
	leaving []*inbound    // of Receive
	quiet   bool          // the Receive before found nothing; of Receive
}

var _ driver.Backend = (*Backend)(nil)

// fabric is what this package needs of a ucp.Context, where each method is described. Tests put
// another one in its place.
type fabric interface {
	Close() error
	Address(worker int) []byte
	Poll(done []ring.Done) int
	Drive()
	Arm() bool
	Receive() (ucp.Notif, bool)
	Control() (ucp.Control, bool)
	Map(key uint32, m ucp.Memory) error
	Revoke(key uint32, limit time.Duration) error
	connect(worker int, address []byte) (link, error)
}

// link is a ucp.Conn.
type link interface {
	ID() uint64
	Bind(peer, grace uint64)
	Control(msg []byte) error
	Lanes() string
	Import(m ucp.Import) (slot uint32, err error)
	Drop(slot uint32)
	Submit(tag uint64, b *driver.Batch) error
	Notify(msg []byte) error
	Cancel(tag uint64)
	Help(tag uint64, stop <-chan struct{}) bool
	Drain(grace time.Duration) error
	End(status int32, proven bool)
	Silence() (heard, waited time.Duration)
	GiveUp()
	Close(grace time.Duration) error
}

// New opens UCX and starts a backend: Config.Workers threads and two goroutines. Where UCX, or
// what it needs, is missing the error is a *driver.UnavailableError.
func New(cfg Config) (*Backend, error) { return open(cfg, openUCX) }

// open makes a backend over what with opens.
func open(cfg Config, with func(ucp.Config) (fabric, error)) (b *Backend, err error) {
	cfg.EnsureDefaults()
	transports, err := networkTransports(cfg.Transports)
	if err := cmp.Or(cfg.check(), err); err != nil {
		return nil, fmt.Errorf("ucx: %w", err)
	}
	if err := ucp.Load(cfg.Library); err != nil {
		return nil, err // it names the backend and the cure
	}
	b = &Backend{cfg: cfg, caps: cfg.caps(), event: -1,
		closing: make(chan struct{}), peers: make(map[*peer]struct{}),
		ends: make(map[uint64]end), inbounds: make(map[inboundID]*inbound),
		accepted: make(map[uint64]*inbound), kernel: session.OutboundByHost}
	b.table.Most = cfg.KeysMax
	defer func() {
		if err != nil {
			b, err = nil, errors.Join(fmt.Errorf("ucx: %w", err), b.release())
		}
	}()
	b.address.owner, b.address.pid = session.NewOwner(), uint32(os.Getpid())
	b.address.hosts = ownHosts()
	if b.address.host, err = proc.Host(); err != nil {
		return b, err
	}
	if b.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return b, fmt.Errorf("create event: %w", os.NewSyscallError("eventfd", err))
	}
	if b.control, err = proc.NewEvent(); err != nil {
		return b, err
	}
	u := cfg.context(transports)
	u.WakeFD, u.ControlFD = b.event, b.control.FD()
	if b.net, err = with(u); err != nil {
		return b, err
	}
	for w := range cfg.Workers {
		b.address.workers = append(b.address.workers, b.net.Address(w))
	}
	if b.addr, err = b.address.encode(); err != nil {
		return b, err
	}
	b.attending.Go(b.attend)
	b.attending.Go(b.pulse)
	return b, nil
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.caps }

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return b.addr }

// Close implements driver.Backend.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	// No call begins, and those that wait for a peer end.
	b.gate.Shut()
	close(b.closing)
	b.gate.Wait()
	// Our peers, all at once, as Peer.Close does it.
	var wg sync.WaitGroup
	b.mu.Lock()
	open := slices.Collect(maps.Keys(b.peers))
	b.mu.Unlock()
	for _, p := range open {
		wg.Go(func() { _ = p.Close() }) // a peer's Close has nothing to report
	}
	wg.Wait()
	// Memories, so that no peer reaches them: first the epochs of all, then the proofs.
	memories := b.table.All()
	for _, m := range memories {
		m.endEpoch()
	}
	for _, m := range memories {
		_ = m.Revoke(context.Background()) // never fails
	}
	// What others have to us.
	b.tasks.Wait()
	for _, c := range b.inbound() {
		wg.Go(c.closeLink)
	}
	wg.Wait()
	err := b.release()
	b.attending.Wait()
	b.ended.Store(true)
	return err
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if b.net != nil {
		errs = append(errs, b.net.Close())
	}
	if b.control != nil {
		errs = append(errs, b.control.Close()) // attend ends by it
	}
	if b.event >= 0 {
		errs = append(errs, unix.Close(b.event))
	}
	return errors.Join(errs...)
}
