// SPDX-License-Identifier: Apache-2.0

// Package rdma is a backend that moves bytes with one-sided RDMA operations over InfiniBand and
// RoCE. It uses all ports of all NICs.
//
// A rail is a port that the backend has opened. A connection has several queue pairs, each over one
// rail of this side and one of the peer's. A batch goes over one queue pair or is spread over all.
//
// Package csrc/verbs is the data path: it turns batches into work requests and handles their
// completions. This package is the control path. Each connection has a control connection over TCP.
// The two backends handle its messages (wire.go) without their programs.
//
// # A connection
//
// The initiator (initiator.go) chooses the queue pairs by the owner's Addr (match), makes its ends
// and sends hello. The owner (owner.go) admits the connection, makes its own ends and sends
// welcome. A queue pair is live after a probe, a request without bytes, has completed on it.
//
// # A write
//
// Register pins the memory on all rails (memory.go, pins.go). Import sends the token to the owner.
// The owner grants the memory to the peer: its NICs register the memory again, with a remote key
// and addresses for peers, and the owner answers with these. Submit hands a batch to csrc/verbs. A
// batch completes when the owner's NIC has acknowledged each request, or when the owner has seen a
// later message on the same queue pair.
//
// # A queue pair that fails
//
// The initiator's mender (repair.go) asks the owner to destroy its end, too, and to make a new one.
// The initiator repeats requests of the failed queue pair only after the owner's answer. So no
// packet of a first attempt can land after the second has completed.
//
// # Proofs
//
//   - Revoke (proof.go): the owner ends the epoch and tells the peers. Then its kernel deregisters
//     the grant; after that call no request with the key can land. If a NIC does not release a key,
//     the owner first destroys the queue pairs of the peers that have the key. A NIC may use the
//     key again, but the owner never grants the same addresses again before they are safe (see
//     addresses).
//   - End of a connection (peer.end, peer.endLost): the initiator ends its queue pairs, then the
//     owner does. The owner's answer to a bye proves that no write of the initiator can land, and
//     so does Config.PacketLife. Without either, writes under way end with driver.ErrUnproven.
//   - Loss: a peer is lost when its host does not acknowledge what it was sent (poll.go). A process
//     that only responds late is not lost.
//
// Against a hostile peer only tokens and the NIC's remote keys protect. A remote key has 32 bits
// and can be guessed with effort.
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

	net          fabric
	rails        []*rail
	nodes        topology.Nodes // NUMA nodes; empty: one
	peermem      bool           // a kernel module lets NICs register device memory by address
	faultThreads int            // threads that touch pages before they are pinned; 1: none
	listeners    []net.Listener
	event        int         // the eventfd of FD: completions, messages, room
	control      *proc.Event // signalled by C when net.News has an event

	gate      session.Gate  // entered by every call that uses net
	closing   chan struct{} // closed when Close begins
	closeOnce sync.Once
	closed    chan struct{} // closed when Close has ended
	closeErr  error         // the result of Close; set before closed is closed
	stopNews  atomic.Bool   // makes attend return
	ended     atomic.Bool   // no completion follows
	table     session.KeyTable[memory]
	pinnings  pinnings
	addresses addresses
	words     session.LastWords[*inbound] // connections whose end Receive has still to report
	answers   answerQueue
	lobby     *session.Lobby // connections in the handshake
	tasks     session.Tasks  // inbound connections, and calls that continue in the background
	attending sync.WaitGroup // accept, attend and pulse

	mu        sync.Mutex
	peers     map[*peer]struct{}
	accepted  map[*inbound]struct{} // nil after close
	admitted  session.HostCount     // inbound connections, against Config.ConnsMax
	keptLinks []link                // links whose Close failed because a NIC keeps a queue pair

	endsMu sync.RWMutex
	ends   map[uint64]end // by link.ID

	scratch [64]verbs.Done // for Poll
	idle    bool           // the last Poll found nothing
	leaving []*inbound     // for Receive
	quiet   bool           // the last Receive found nothing
}

var _ driver.Backend = (*Backend)(nil)

// end is this side's end of a connection, a *peer or an *inbound. One goroutine calls onNews, which
// must not block.
type end interface{ onNews(n verbs.News) }

// New opens libibverbs and the rails, and listens for peers. If the library, the kernel's support,
// a device or an active port is missing, the error is a *driver.UnavailableError that says how to
// fix that.
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
		faultThreads: min(runtime.GOMAXPROCS(0), faultThreadsMax),
		closing:      make(chan struct{}), closed: make(chan struct{}),
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
	b.caps = cfg.caps(b.canPinDevice())
	b.attending.Go(b.attend)
	b.attending.Go(b.pulse)
	for _, l := range b.listeners {
		b.attending.Go(func() { b.accept(l) })
	}
	return b, nil
}

// wrapOpen adds the backend's name to an error that does not have it.
func wrapOpen(err error) error {
	if errors.Is(err, driver.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("rdma: %w", err)
}

// open creates the events, the verbs context, the rails, the listeners and the address.
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

// describe creates the address.
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

// Close implements driver.Backend. It closes all peers in parallel, then revokes all memories, then
// ends the connections that other backends have to this one.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() {
		b.closeErr = b.close()
		close(b.closed)
	})
	return b.closeErr
}

func (b *Backend) close() error {
	// From here on the program has no call in the backend, except Poll.
	b.gate.Shut()
	close(b.closing)
	b.gate.Wait()

	// Close the connections that this side began, in parallel.
	b.mu.Lock()
	peers := slices.Collect(maps.Keys(b.peers))
	b.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(peers))
	for i, p := range peers {
		wg.Go(func() { errs[i] = p.Close() })
	}
	wg.Wait()

	// Revoke the memories: end all epochs before waiting for the first proof.
	memories := b.table.All()
	for _, m := range memories {
		m.end()
	}
	for _, m := range memories {
		_ = m.revokeLock.Lock(context.Background()) // never fails
		err := m.prove(context.Background())
		if err == nil {
			err = m.free()
		}
		m.revokeLock.Unlock()
		errs = append(errs, err)
	}

	// End the connections that peers began, and accept no more.
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

	// Stop the goroutine that takes news, and release the rest.
	b.stopNews.Store(true)
	_ = b.control.Signal() // wakes attend
	b.attending.Wait()
	errs = append(errs, b.release())
	b.ended.Store(true)
	return errors.Join(errs...)
}

// release releases what open has created.
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
