// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// Backend implements driver.Backend.
type Backend struct {
	cfg      Config
	clock    clock.Clock
	caps     driver.Caps
	address  address
	addr     []byte
	listener *net.UnixListener
	event    int // an eventfd: completions, messages, room
	tableFD  int
	table    table

	memories []atomic.Pointer[memory]
	inbound  atomic.Pointer[[]*inbound] // connections that peers opened, by number
	peers    atomic.Pointer[[]*peer]    // connections that we opened
	conns    atomic.Uint64              // numbers of connections that were given out
	closed   atomic.Bool
	armed    atomic.Bool

	mu         sync.Mutex // before peer.mu
	freeKeys   []uint32
	arenas     map[driver.Shared]*arena
	freeArenas []uint32

	gate       writeGate
	done       session.Completions
	jobs       jobPool
	queue      queue
	connecting session.Gate // Connect is in it
	life       context.Context
	end        context.CancelFunc
	mapped     budget         // peers' memory
	lobby      *session.Lobby // handshakes under way
	tasks      sync.WaitGroup
	turn       int // where Receive begins; Receive only
	closing    sync.Once
	closeErr   error
	revokes    sync.RWMutex // held for reading by each Revoke; Close waits for them
}

var _ driver.Backend = (*Backend)(nil)

// New starts a backend: its control socket, one goroutine that accepts peers and
// Config.Workers that copy.
func New(cfg Config) (*Backend, error) { return newBackend(cfg, clock.Host()) }

func newBackend(cfg Config, clock clock.Clock) (*Backend, error) {
	cfg.EnsureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	b := &Backend{cfg: cfg, clock: clock, caps: cfg.caps(), address: newAddress(cfg.SocketDir),
		event: -1, tableFD: -1}
	if err := b.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("shm: %w", err), b.gate.release(), b.release())
	}
	b.start()
	return b, nil
}

func (b *Backend) open() (err error) {
	b.addr = b.address.encode()
	if len(b.addr) > driver.AddrMax {
		return fmt.Errorf("SocketDir of %d bytes: %w", len(b.cfg.SocketDir), driver.ErrBounds)
	}
	if b.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create event: %w", os.NewSyscallError("eventfd", err))
	}
	if b.tableFD, b.table, err = newTable(uint32(b.cfg.KeysMax)); err != nil {
		return memfdError(err)
	}
	if err := b.gate.renew(&b.table, b.passers); err != nil {
		return err
	}
	name := &net.UnixAddr{Name: b.address.socket(), Net: "unixpacket"}
	b.listener, err = net.ListenUnix(name.Net, name)
	if err != nil {
		return fmt.Errorf("listen for peers: %w", err)
	}
	return nil
}

func (b *Backend) start() {
	b.memories = make([]atomic.Pointer[memory], b.cfg.KeysMax)
	b.freeKeys = countdown(b.cfg.KeysMax)
	b.freeArenas = countdown(b.cfg.KeysMax)
	b.arenas = make(map[driver.Shared]*arena)
	b.peers.Store(new([]*peer))
	b.inbound.Store(new([]*inbound))
	b.done.Init(b.cfg.JobsMax)
	b.jobs.init(b.cfg.JobsMax)
	// Each job stands in the queue at most once for itself; others may join in
	// while fewer than JobsMax stand there, and each of those has one in hand.
	b.queue.init(4*b.cfg.JobsMax+b.cfg.Workers, b.cfg.Workers)
	b.lobby = session.NewLobby(handshakesMax, b.clock)
	b.life, b.end = context.WithCancel(context.Background())
	b.tasks.Add(1 + b.cfg.Workers)
	go b.accept()
	for id := range b.cfg.Workers {
		go b.work(id)
	}
}

// countdown lists n numbers so that the lowest is taken first.
func countdown(n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(n - 1 - i)
	}
	return list
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.caps }

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return b.addr }

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	n := b.done.Pop(done)
	if n == 0 && b.closed.Load() && b.done.Taken() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event }

// wake signals the event if it was armed.
func (b *Backend) wake() {
	if b.armed.Load() && b.armed.CompareAndSwap(true, false) {
		signal(b.event)
	}
}

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	if b.closed.Load() {
		return false, driver.ErrClosed
	}
	b.armed.Store(true) // pairs with the load in wake: the work there is pushed before
	ready = b.done.Ready() > 0
	for _, c := range *b.inbound.Load() {
		if c.arm() {
			ready = true
		}
	}
	for _, p := range *b.peers.Load() {
		if p.arm() {
			ready = true
		}
	}
	return ready, nil
}

// Close implements driver.Backend. It ends every epoch and gives peers that
// are in the middle of a copy Config.Grace to leave; one that may still write into memory that is
// not shareable is driver.ErrTimeout.
func (b *Backend) Close() error {
	b.closing.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.mu.Lock()
	b.closed.Store(true)
	b.mu.Unlock()
	b.lobby.Close()
	err := b.listener.Close()
	b.connecting.Shut()
	b.end()
	b.connecting.Wait()
	open := *b.peers.Load()
	var wg sync.WaitGroup
	for _, p := range open {
		wg.Go(func() { _ = p.Close() }) // a peer's Close has nothing to report
	}
	wg.Wait()
	err = errors.Join(err, b.closeMemories())
	for _, c := range *b.inbound.Load() {
		c.hangUp()
	}
	b.queue.close()
	b.tasks.Wait()
	b.revokes.Lock() // no Revoke waits once closed is set
	defer b.revokes.Unlock()
	for _, c := range *b.inbound.Load() {
		c.release()
	}
	b.inbound.Store(new([]*inbound))
	return errors.Join(err, b.release())
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if b.table.mem != nil {
		errs = append(errs, unix.Munmap(b.table.mem))
	}
	for _, fd := range []int{b.event, b.tableFD} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}
