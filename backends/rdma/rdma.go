// SPDX-License-Identifier: Apache-2.0

// Package rdma moves bytes over RDMA verbs: InfiniBand and RoCE, one-sided, over as many ports of
// as many NICs as there are.
//
// A rail is a port that we opened. A queue pair is one of a connection, over one rail of ours and
// one of the peer's. A batch goes over one queue pair or is spread over all. The package csrc/verbs
// is the data path: from batches to work requests, and what becomes of each. This package has what
// goes over the control connection, a TCP connection beside each connection, and answers it without
// the program of either side. Its messages are in wire.go.
//
// # A connection
//
// The initiator (initiator.go) chooses the queue pairs by the owner's Addr (match), makes its ends
// and sends hello. The owner (owner.go) admits it, makes its own ends and sends welcome. A queue
// pair is live when a request without bytes has come back over it.
//
// # A write
//
// Register pins the memory on all rails (memory.go, pins.go). Import shows the token to the owner;
// it has its NICs grant the memory, which is a registration of its own with a key and addresses of
// its own, and answers with them. Submit hands a batch to csrc/verbs. Its completion means that the
// owner's NIC has acknowledged each request, or that a later message of the same queue pair was
// seen by the owner.
//
// # A queue pair that fails
//
// The initiator's mender (repair.go) asks the owner to end its end too, and to make a new one. Only
// the answer allows what was under way to be sent again over any queue pair: a packet of the first
// try cannot land after the second was reported done.
//
// # What is proved
//
//   - Revoke (proof.go): the epoch ends, and peers are told. Then the owner's kernel deregisters
//     the grant: when that call returns, nothing that was begun with the key lands. Where a NIC
//     does not let go of a key, the queue pairs of the peers that know it end first. A NIC may give
//     the key out again, but not with the same addresses (addresses).
//   - The end of a connection (peer.end, peer.endLost): our queue pairs end, then the owner's. Its
//     answer to a bye is the proof that nothing of ours lands any more, or Config.PacketLife. Where
//     there is neither, writes under way end with driver.ErrUnproven.
//   - A host that acknowledges nothing of what it was sent is lost (poll.go), a process that is
//     late is not.
//
// Against a hostile peer only tokens protect, and the keys of the NIC, which 32 bits make hard to
// guess and no more.
package rdma

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/topology"
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
	nodes     topology.Nodes // of NUMA; empty: there is one
	peermem   bool           // the kernel takes addresses of devices
	finders   int            // threads that find pages; 1: the driver does
	listeners []net.Listener
	event     int         // an eventfd: completions, messages, room
	control   *proc.Event // news of C

	gate      session.Gate  // held by every call that uses the context
	closing   chan struct{} // closed when Close begins
	closeOnce sync.Once
	closed    chan struct{} // closed when Close has ended
	closeErr  error         // before closed is closed
	stopNews  atomic.Bool   // attend is to end
	ended     atomic.Bool   // no completion will come any more
	table     session.KeyTable[memory]
	pinnings  pinnings
	addresses addresses
	words     session.LastWords[*inbound]
	answers   answers
	lobby     *session.Lobby // connections that have not said hello
	tasks     session.Tasks  // connections, and what takes too long for its callers
	attending sync.WaitGroup // listeners, and the goroutine that takes news

	mu        sync.Mutex
	peers     map[*peer]struct{}
	accepted  map[*inbound]struct{} // nil once closed
	admitted  session.HostCount     // peers that have an end here
	keptLinks []link                // ended, but for a queue pair that a NIC keeps

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
type end interface{ onNews(n verbs.News) }

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
		cfg: cfg, event: -1, peermem: cfg.sysfs.peermem(),
		finders: min(runtime.GOMAXPROCS(0), findersMax),
		closing: make(chan struct{}), closed: make(chan struct{}),
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
	b.nodes = topology.Sysfs(b.cfg.sysfs.root).Nodes()
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

// Close implements driver.Backend. Peers are closed first, as Peer.Close does it, all at
// once; then memories, so that no peer reaches them; then what others have to us.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() {
		b.closeErr = b.close()
		close(b.closed)
	})
	return b.closeErr
}

func (b *Backend) close() error {
	// No call is within from here on, but Poll.
	b.gate.Shut()
	close(b.closing)
	b.gate.Wait()

	// The connections that we began, all at once.
	b.mu.Lock()
	peers := slices.Collect(maps.Keys(b.peers))
	b.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(peers))
	for i, p := range peers {
		wg.Go(func() { errs[i] = p.Close() })
	}
	wg.Wait()

	// Our memory: all epochs end before the first proof is waited for.
	memories := b.table.All()
	for _, m := range memories {
		m.end()
	}
	for _, m := range memories {
		_ = m.turn.Take(context.Background()) // never fails
		err := m.prove(context.Background())
		if err == nil {
			err = m.free()
		}
		m.turn.Give()
		errs = append(errs, err)
	}

	// The connections that peers began, and all that may still begin one.
	b.mu.Lock()
	accepted := b.accepted
	b.accepted = nil
	b.mu.Unlock()
	for c := range accepted {
		c.quit()
	}
	b.lobby.Close()
	for _, l := range b.listeners {
		errs = append(errs, l.Close())
	}
	b.tasks.Wait()

	// Then nothing has news, and the rest is given back.
	b.stopNews.Store(true)
	_ = b.control.Signal() // attend ends by it
	b.attending.Wait()
	errs = append(errs, b.release())
	b.ended.Store(true)
	return errors.Join(errs...)
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if !b.gate.IsShut() { // open has failed
		for _, l := range b.listeners {
			errs = append(errs, l.Close())
		}
	}
	if b.net != nil {
		errs = append(errs, b.net.Close())
	}
	if b.control != nil {
		errs = append(errs, b.control.Close()) // nothing writes to it any more
	}
	if b.event >= 0 {
		errs = append(errs, unix.Close(b.event))
	}
	return errors.Join(errs...)
}
