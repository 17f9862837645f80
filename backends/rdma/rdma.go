// SPDX-License-Identifier: Apache-2.0

// Package rdma moves bytes over RDMA verbs: InfiniBand and RoCE, one-sided, over as many
// ports of as many NICs as there are.
//
// A rail is a port that we opened, a pair a reliable queue pair of a connection over one
// rail of ours and one of the peer's. A batch goes over one queue pair or is spread over all.
// The data path is package csrc's; here is what is said beforehand and when something
// fails: which ports and GIDs (devices.go, rail.go), messages and addresses (wire.go), how
// connections begin, and end (initiator.go; accept.go, inbound.go for the owner's end), what a
// token opens (memory.go, addresses.go), and how a queue pair that failed comes back (mend.go).
//
// All that is said goes over a TCP connection for each connection, and is answered by
// goroutines: the program takes no part. Its end is the notice of death.
//
// A queue pair that fails is ended on both sides before anything of it is sent again, so that
// no late packet of the first try lands after the second was reported done. A revoke is
// a key that the NIC forgets; the owner's kernel does it alone. The NIC may give that key out
// again, but not with the same addresses. Against a hostile peer only tokens protect, and the keys
// of the NIC, which 32 bits make hard to guess and no more.
package rdma

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Backend implements driver.Backend.
type Backend struct {
	driver.BackendBase

	cfg     Config
	caps    driver.Caps
	address address
	addr    []byte

	net       fabric
	rails     []*rail
	numa      numa
	locked    memlock
	peermem   bool // the kernel takes addresses of devices
	finders   int  // threads that find pages; 1: the driver does
	listeners []net.Listener
	event     int         // an eventfd: completions, messages, room
	control   *proc.Event // news of C

	gate      session.Gate  // held by every call that uses the context
	closing   chan struct{} // closed when Close begins
	closeOnce sync.Once
	closeErr  error
	deaf      atomic.Bool // attend is to end
	ended     atomic.Bool // no completion will come any more
	table     session.KeyTable[memory]
	pinnings  pinnings
	addresses addresses
	words     session.LastWords[*inbound]
	answers   answers
	lobby     *session.Lobby // connections that have not said hello
	tasks     session.Tasks  // connections, and what takes too long for its callers
	attending sync.WaitGroup // listeners, and the goroutine that takes news

	mu       sync.Mutex
	peers    map[*peer]struct{}
	accepted map[*inbound]struct{} // nil once closed
	admitted session.HostCount     // peers that have an end here
	kept     []link                // ended, but for a queue pair that a NIC keeps

	endsMu sync.RWMutex
	ends   map[uint64]end // by what C calls them

	scratch [64]verbs.Done // of Poll
	idle    bool           // the Poll before found nothing; of Poll
	leaving []*inbound     // of Receive
	quiet   bool           // the Receive before found nothing; of Receive
}

var _ driver.Backend = (*Backend)(nil)

// end is our end of a connection. Its method is called by one goroutine, and must not
// block.
type end interface{ news(n verbs.News) }

// New opens libibverbs and the rails, and listens for peers. Where the library, the
// kernel's support, a device or an active port is missing the error is a
// *driver.UnavailableError, which says what would mend it.
func New(cfg Config) (*Backend, error) {
	return open(cfg, loadVerbs, openVerbs)
}

func loadVerbs(c *Config) error {
	if err := verbs.Load(c.Library); err != nil {
		return err
	}
	_, err := verbs.Devices()
	return err
}

func open(cfg Config, load func(*Config) error, with opener) (*Backend, error) {
	cfg.EnsureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("rdma: %w", err)
	}
	list, err := splitDevices(cfg.Devices)
	if err != nil {
		return nil, fmt.Errorf("rdma: %w", err)
	}
	if err := load(&cfg); err != nil {
		return nil, err // it names the backend and the cure
	}
	b := &Backend{
		cfg: cfg, event: -1, peermem: cfg.sysfs.peermem(), finders: min(runtime.GOMAXPROCS(0),
			findersMax), closing: make(chan struct{}), locked: thisMemlock(),
		peers: make(map[*peer]struct{}), accepted: make(map[*inbound]struct{}),
		ends: make(map[uint64]end), admitted: session.HostCount{Most: cfg.ConnsMax},
		lobby: session.NewLobby(handshakesMax, cfg.clock),
	}
	b.table.Most = cfg.KeysMax
	b.pinnings.b = b
	b.addresses.end, b.addresses.granted = cfg.addresses, make(map[*memory]area)
	if err := b.open(list, with); err != nil {
		return nil, errors.Join(wrapOpen(err), b.release())
	}
	b.caps = cfg.caps(b.takesDevices())
	b.attending.Go(b.attend)
	b.attending.Go(b.pulse)
	for _, l := range b.listeners {
		b.attending.Go(func() { b.accept(l) })
	}
	return b, nil
}

// wrapOpen leaves alone what names the backend itself.
func wrapOpen(err error) error {
	if errors.Is(err, driver.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("rdma: %w", err)
}

// open makes the events, the context, the rails and the address.
func (b *Backend) open(list []wanted, with opener) (err error) {
	if b.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create event: %w", os.NewSyscallError("eventfd", err))
	}
	if b.control, err = proc.NewEvent(); err != nil {
		return err
	}
	b.net, err = with(verbs.Config{
		BatchesMax: b.cfg.BatchesMax, NotifyMax: b.cfg.NotifyMax, ConnsMax: b.cfg.ConnsMax,
		Depth: b.cfg.QueueDepth, SliceMax: uint64(b.cfg.Slice), FlightMax: uint64(b.cfg.Flight),
		SpinNanos: uint64(b.cfg.Spin), StallNanos: uint64(b.cfg.stall()), WakeFD: b.event,
		ControlFD: b.control.FD(),
	})
	if err != nil {
		return err
	}
	if err := b.openRails(list); err != nil {
		return err
	}
	b.numa = b.cfg.sysfs.nodes()
	if err := b.listen(); err != nil {
		return err
	}
	return b.describe()
}

// describe makes the address.
func (b *Backend) describe() (err error) {
	b.address.owner = session.NewOwner()
	b.address.process = uint32(os.Getpid())
	b.address.notifs = uint32(b.cfg.NotifyMax)
	if b.address.host, err = proc.Host(); err != nil {
		return err
	}
	for _, r := range b.rails {
		b.address.rails = append(b.address.rails, r.address())
	}
	b.addr, err = b.address.encode()
	return err
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.caps }

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return b.addr }

func (b *Backend) add(id uint64, e end) {
	b.endsMu.Lock()
	b.ends[id] = e
	b.endsMu.Unlock()
}

func (b *Backend) remove(id uint64) {
	b.endsMu.Lock()
	delete(b.ends, id)
	b.endsMu.Unlock()
}

func (b *Backend) end(id uint64) end {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return b.ends[id]
}
