// SPDX-License-Identifier: Apache-2.0

// Package ucx moves bytes between hosts over the network transports that UCX finds: RDMA, TCP.
//
// It reaches a peer of the same host as any other, over the network. It uses none of UCX's
// transports that share memory: on one host the shm backend copies once and costs less.
//
// Bytes are copied into messages: UCX never reads or writes memory of the program. The owner's
// own thread lands what is written, after it has compared the ticket that each message shows, and
// how old the message is. So the proof that nothing lands later is local to the owner, whatever a
// network still holds: Revoke ends the ticket, and waits for no peer.
//
// The data path, its threads and the messages with data are package csrc/ucx's. This package has
// the control messages: they and addresses (wire.go), how connections begin and end (initiator.go;
// accept.go and inbound.go for the owner's end), and what a token opens (memory.go). One goroutine
// handles the control messages of a backend (poll.go); it starts a task for what may take time.
//
// A peer whose host acknowledges nothing for Config.Failure while something waits for it is given
// up. A write to it ends once the owner would ask before it lands the bytes (Config.Grace of both
// sides, the larger). Against a hostile peer only tokens protect: it can claim to be another
// backend.
package ucx

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

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

// New opens UCX and starts a backend: Config.Workers threads and two goroutines. Where UCX, or
// what it needs, is missing the error is a *driver.UnavailableError.
func New(cfg Config) (*Backend, error) {
	return open(cfg, openUCX)
}

func open(cfg Config, with opener) (*Backend, error) {
	cfg.EnsureDefaults()
	transports, err := networkTransports(cfg.Transports)
	if err := cmp.Or(cfg.check(), err); err != nil {
		return nil, fmt.Errorf("ucx: %w", err)
	}
	if err := ucp.Load(cfg.Library); err != nil {
		return nil, err // it names the backend and the cure
	}
	b := &Backend{cfg: cfg, caps: cfg.caps(), event: -1,
		closing: make(chan struct{}), peers: make(map[*peer]struct{}),
		ends: make(map[uint64]end), inbounds: make(map[inboundID]*inbound),
		accepted: make(map[uint64]*inbound)}
	b.table.Most, b.kernel = cfg.KeysMax, session.OutboundByHost
	if err := b.open(transports, with); err != nil {
		return nil, errors.Join(fmt.Errorf("ucx: %w", err), b.release())
	}
	b.attending.Go(b.attend)
	b.attending.Go(b.pulse)
	return b, nil
}

// open makes the events, the context and the address.
func (b *Backend) open(transports string, with opener) (err error) {
	b.address.owner, b.address.pid = session.NewOwner(), uint32(os.Getpid())
	if b.address.host, err = proc.Host(); err != nil {
		return err
	}
	b.address.hosts = ownHosts()
	if b.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create event: %w", os.NewSyscallError("eventfd", err))
	}
	if b.control, err = proc.NewEvent(); err != nil {
		return err
	}
	u := b.cfg.context(transports)
	u.WakeFD, u.ControlFD = b.event, b.control.FD()
	if b.net, err = with(u); err != nil {
		return err
	}
	for w := range b.cfg.Workers {
		b.address.workers = append(b.address.workers, b.net.Address(w))
	}
	b.addr, err = b.address.encode()
	return err
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.caps }

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return b.addr }
