// SPDX-License-Identifier: Apache-2.0

// Package ucx moves bytes over UCX: between machines over whatever it finds
// there (RDMA, TCP), and between processes of one host through shared memory.
//
// A backend has two contexts of UCX. The near one holds the transports that share
// memory and serves peers of this host; memory of Backend.Alloc its peers map, and
// plain loads and stores move the bytes. The far one holds all others. Wherever
// memory is not mapped, the owner's own thread lands what is written, after it has
// compared the ticket that each message shows, and how old the message is: near it has
// the kernel copy the bytes out of the writer's memory, far the message carries them. So
// the proof that nothing lands later is local to the owner, whatever a network still
// holds. Bytes are always copied into messages: UCX never sends from the program's
// memory. Only a peer that has mapped memory must be asked (Fence), and is shut out by
// fresh pages when it is frozen.
//
// The data path, its threads and what they exchange is package csrc's. Here is
// what is said beforehand: addresses (address.go), how connections begin and end
// (connect.go, peer.go for the initiator's end; accept.go, inbound.go for the
// owner's), and what a token opens (memory.go, imports.go). One goroutine handles
// the control messages of a backend; what may take time it hands on.
//
// A far peer whose host acknowledges nothing for Config.Failure while something waits for it is
// given up, and a near one that is silent for so long. A write to it ends once the owner would ask
// before it lands the bytes (Config.Grace of both sides, the larger). Against a hostile peer only
// tokens protect: it can claim to be another backend.
package ucx

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/ring"
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/gate"
	"github.com/sluicehq/sluice/internal/keys"
	"github.com/sluicehq/sluice/internal/lastword"
	"github.com/sluicehq/sluice/internal/park"
	"github.com/sluicehq/sluice/internal/process"
	"github.com/sluicehq/sluice/internal/silence"
)

// Backend implements driver.Backend.
type Backend struct {
	cfg     Config
	caps    driver.Caps
	address address
	addr    []byte

	near, far *side   // nil: absent
	sides     []*side // those that are there
	event     int     // an eventfd: completions, messages, room
	control   *park.Event

	gate        gate.Gate     // held by every call that uses the contexts
	closing     chan struct{} // closed when Close begins
	closeOnce   sync.Once
	closeErr    error
	ended       atomic.Bool // no completion will come any more
	table       keys.Table[memory]
	allocations allocations
	deaths      deaths
	words       lastword.List[*inbound]
	conns       atomic.Uint64  // numbers of connections that were given out
	tasks       gate.Tasks     // what takes too long for the control goroutine
	attending   sync.WaitGroup // that goroutine, and pulse
	kernel      func() map[netip.Addr]silence.Outbound

	mu    sync.Mutex
	peers map[*peer]struct{}
	// backends of this host that shared memory does not reach, until then
	detours map[keys.Owner]time.Time

	acceptedMu sync.RWMutex
	accepted   map[uint64]*inbound // by number

	scratch [64]ring.Done // of Poll
	idle    bool          // the Poll before found nothing; of Poll
	turn    int           // where Receive begins; Receive only
	leaving []*inbound    // of Receive
	quiet   bool          // the Receive before found nothing; of Receive
}

var _ driver.Backend = (*Backend)(nil)

// New opens UCX and starts a backend: Config.Workers threads for near peers and
// as many for far ones, and one goroutine. Where UCX, or what it needs, is missing
// the error is a *driver.UnavailableError.
func New(cfg Config) (*Backend, error) {
	return open(cfg, func(c *Config) error { return ucp.Load(c.Library) }, openUCX)
}

func open(cfg Config, load func(*Config) error, with opener) (*Backend, error) {
	cfg.EnsureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("ucx: %w", err)
	}
	list, err := splitTransports(cfg.Transports)
	if err != nil {
		return nil, fmt.Errorf("ucx: %w", err)
	}
	if err := load(&cfg); err != nil {
		return nil, err // it names the backend and the cure
	}
	b := &Backend{cfg: cfg, caps: cfg.caps(list), event: -1, closing: make(chan struct{}),
		peers:    make(map[*peer]struct{}),
		accepted: make(map[uint64]*inbound), detours: make(map[keys.Owner]time.Time)}
	b.table.Most, b.kernel = cfg.KeysMax, silence.ByHost
	if err := b.open(list, with); err != nil {
		return nil, errors.Join(fmt.Errorf("ucx: %w", err), b.release())
	}
	b.attending.Go(b.attend)
	if b.far != nil {
		b.attending.Go(b.pulse)
	}
	registry.add(b.address.owner)
	return b, nil
}

// open makes the events, the contexts and the address.
func (b *Backend) open(list transports, with opener) (err error) {
	b.address.owner = keys.NewOwner()
	if b.address.process, err = process.This(); err != nil {
		return err
	}
	if b.address.host, err = process.Host(); err != nil {
		return err
	}
	b.address.hosts = ownHosts()
	b.deaths.init(b.address.process)
	if b.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create event: %w", os.NewSyscallError("eventfd", err))
	}
	if b.control, err = park.NewEvent(); err != nil {
		return err
	}
	if list.near != "" {
		if b.near, err = b.openSide(b.cfg.nearConfig(list), with); err != nil {
			return err
		}
		b.address.near = b.near.addresses()
	}
	if list.far != "" {
		if b.far, err = b.openSide(b.cfg.farConfig(list), with); err != nil {
			return err
		}
		b.address.far = b.far.addresses()
	}
	if b.near != nil && b.far != nil {
		b.near.net.standBeside(b.far.net)
	}
	b.addr, err = b.address.encode()
	return err
}

func (b *Backend) openSide(u ucp.Config, with opener) (*side, error) {
	u.WakeFD, u.ControlFD = b.event, b.control.FD()
	net, err := with(u)
	if err != nil {
		return nil, explainRoom(err, shmDir)
	}
	l := newSide(b, net, u.Shared)
	b.sides = append(b.sides, l)
	return l, nil
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.caps }

// Addr implements driver.Backend.
func (b *Backend) Addr() []byte { return b.addr }
