// SPDX-License-Identifier: Apache-2.0

package files

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// Config describes a backend to its core.
type Config struct {
	Caps    driver.Caps
	Can     driver.Can
	Memory  string // the memory on the other side of a transfer, for messages: "host memory"
	Disk    string // the device that may not answer, for messages: "the disk"
	KeysMax int    // bounds the registered memories
	JobsMax int    // bounds the batches accepted and not yet polled
	Depth   int    // bounds the requests that the Mover has

	PieceMax  uint64 // bounds the bytes of one request
	CachedMax uint64 // bounds the bytes of one write through the page cache
	SplitMin  uint64 // least bytes of whole blocks in a part of an item that get their own request
	GapMax    int    // largest gap between two items that a bounced read includes; negative: none
	PlacesMax int    // bounds the places of one request; at most 64

	// ScatterMax bounds the bytes of one write through the page cache of a regular file whose
	// places do not follow one another (Request.Scattered); 0: the Mover takes none.
	ScatterMax uint64

	// AnyReads says that the Mover can read at any alignment without the page cache. Then no read
	// uses a buffer, and an EINVAL does not mean that the filesystem refuses O_DIRECT.
	AnyReads bool
	Buffered bool // all bytes go through the page cache
	Durable  bool // every write is durable
}

// Mover executes requests by io_uring, threads or cuFile. A request lands when the Mover has
// finished it.
type Mover interface {
	// Put begins a request, at the latest with the next Kick. Each request lands exactly once. The
	// core holds Core.Mu during Put, Cancel, Reap and Listen; they make no system call.
	Put(r *Request)
	// Cancel asks to end a request early; its Ending is set. The request lands nevertheless.
	Cancel(r *Request)
	// Reap returns requests that have landed.
	Reap(out []Landing) int
	// Listen says whether the Mover must call Core.Serve for landings even if the program does not
	// poll.
	Listen(need bool)

	// Kick begins the requests that were put.
	Kick()
	// Pending reports whether Reap would return a request.
	Pending() bool
	// Arm makes the next landing, or the next Wake, signal Core.Event. It reports whether Reap
	// would return a request already.
	Arm() (pending bool)
	// Wake signals Core.Event if Arm was called since the last signal.
	Wake()

	// AddFile prepares a file for requests. Core.Mu is held.
	AddFile(f *File) error
	// DropFile undoes AddFile. After an error it may be called again. Core.Mu is held.
	DropFile(f *File) error
	// AddMemory prepares memory of the program for requests.
	AddMemory(m *Memory, seg *driver.Segment) error
	// DropMemory undoes AddMemory. After an error it may be called again.
	DropMemory(m *Memory) error
	// Explain implements Peer.Explain; remote may be nil. Core.Mu is held.
	Explain(local, remote *Memory) string
	// Close releases everything. No request is under way.
	Close() error
}

// Sleeper is a Mover in which a goroutine can sleep until requests land.
type Sleeper interface {
	// Waits returns how many of n landings Sleep can wait for; 0: there is nothing to wait for.
	// Core.Mu is held.
	Waits(n int) int
	// Sleep begins the requests that were put, and returns when that many have landed since Waits,
	// or a few milliseconds later.
	Sleep(n int)
}

// Core schedules the requests of a backend. Movers call it; programs use the Backend.
type Core struct {
	Config
	Mu    sync.Mutex
	Event *proc.Event // the program sleeps on it after Arm
	Mover Mover

	gate    session.Gate // entered by each call that uses Mover
	done    session.Completions
	owner   session.Owner
	addr    []byte
	table   session.KeyTable[Memory]
	closed  atomic.Bool
	closing sync.Once
	err     error // the result of Close
	foreign error // for a local key of a file, or a token of memory
	distant error // for an address or a token of another process
	bounce  []byte

	// Guarded by Mu.
	news     bool // there are completions, and Wake was not called since
	peers    map[*Peer]struct{}
	files    map[fileKey]*File
	inodes   map[inodeKey]*inode
	jobs     []job
	freeJobs []*job
	queue    turns // jobs whose last request has not begun
	failed   bool  // jobs in the queue may have failed
	requests []Request
	free     []*Request
	again    []*Request // wait to be handed to the Mover again
	trays    []*tray
	unsynced []*inode // inodes whose next fdatasync waits for a free request
	durables int      // durable jobs under way
	lastJob  *job     // the one submitted last
	helped   *job     // for which a goroutine is in Peer.Help, one at a time; nil: none
	// memory on whose Renew a goroutine of mayEnter waits
	renewWaiters map[driver.Shared]struct{}
	ended        sync.Cond // signalled at the end of a job
	waiters      int       // goroutines that wait for ended
}

var errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)

// Backend implements driver.Backend with a Core.
type Backend struct {
	driver.BackendBase
	core *Core
}

// Open returns a backend. It calls open to make the Mover.
func Open(cfg Config, open func(*Core) (Mover, error)) (Backend, error) {
	name := cfg.Caps.Name
	c := &Core{Config: cfg, owner: session.NewOwner(), peers: map[*Peer]struct{}{},
		files: map[fileKey]*File{}, inodes: map[inodeKey]*inode{},
		renewWaiters: map[driver.Shared]struct{}{}}
	c.addr = append([]byte(name+":"), c.owner[:]...)
	c.table.Most = cfg.KeysMax
	c.foreign = fmt.Errorf("%s moves between %s of the initiator and files: %w", name, cfg.Memory,
		driver.ErrNotSupported)
	c.distant = fmt.Errorf("%s reaches files of its own process only: those of others are served "+
		"by their engines", name)
	c.ended.L = &c.Mu
	c.done.Init(cfg.JobsMax)
	c.jobs = make([]job, cfg.JobsMax)
	for i := range c.jobs {
		c.freeJobs = append(c.freeJobs, &c.jobs[i])
	}
	err := c.openRequests()
	if err == nil {
		c.Event, err = proc.NewEvent()
	}
	if err == nil {
		var mover Mover
		if mover, err = open(c); err == nil {
			c.Mover = mover
			return Backend{core: c}, nil
		}
	}
	return Backend{}, errors.Join(err, c.release())
}

func (c *Core) openRequests() (err error) {
	if !c.AnyReads {
		if c.bounce, err = mapAnonymous(c.Depth * BounceBytes); err != nil {
			return fmt.Errorf("%s: map %d buffers: %w", c.Caps.Name, c.Depth, err)
		}
	}
	c.requests = make([]Request, c.Depth)
	c.free = make([]*Request, 0, c.Depth)
	c.again = make([]*Request, 0, c.Depth)
	for i := c.Depth - 1; i >= 0; i-- {
		r := &c.requests[i]
		r.Slot = i
		if c.bounce != nil {
			r.buffer = c.bounce[i*BounceBytes:][:BounceBytes:BounceBytes]
		}
		c.free = append(c.free, r)
	}
	return nil
}

// Bounce is the memory of the requests' buffers.
func (c *Core) Bounce() []byte { return c.bounce }

// Helped reports whether the only job under way is one for which a goroutine is in Peer.Help: that
// one calls Serve for all landings, so that nobody else need do so or be woken. Mu is held.
func (c *Core) Helped() bool {
	return c.helped != nil && len(c.jobs)-len(c.freeJobs) == 1
}

// Request returns the request of a slot.
func (c *Core) Request(slot int) *Request { return &c.requests[slot] }

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.core.Caps }

// Addr implements driver.Backend. Only this process can connect to the address.
func (b *Backend) Addr() []byte { return b.core.addr }

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.core.Event.FD() }

// Poll implements driver.Backend.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	c := b.core
	if c.gate.Enter() {
		if c.Mover.Pending() {
			c.Serve()
		}
		c.gate.Exit()
	}
	n := c.done.Pop(done)
	if n == 0 && c.closed.Load() && c.done.Taken() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// Arm implements driver.Backend. The Mover sets a flag before it looks for landings; a goroutine
// that adds a completion checks the flag afterwards. So either Arm sees the completion, or that
// goroutine wakes the program.
func (b *Backend) Arm() (ready bool, err error) {
	c := b.core
	if !c.gate.Enter() {
		return false, driver.ErrClosed
	}
	defer c.gate.Exit()
	pending := c.Mover.Arm()
	return pending || c.done.Ready() > 0, nil
}

// Connect implements driver.Backend, for the backend's own Addr.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	c := b.core
	if ctx.Err() != nil {
		return nil, driver.ContextError(ctx)
	}
	if c.closed.Load() {
		return nil, driver.ErrClosed
	}
	if !bytes.Equal(addr, c.addr) {
		return nil, fmt.Errorf("connect: %w: %w", c.distant, driver.ErrNotSupported)
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.closed.Load() {
		return nil, driver.ErrClosed
	}
	p := &Peer{core: c}
	c.peers[p] = struct{}{}
	return p, nil
}

// Close implements driver.Backend. It ends all jobs and waits for the requests that the disks have.
// Then it closes all peers and memories, waits for the calls that use the Mover, and closes that.
func (b *Backend) Close() error {
	c := b.core
	c.closing.Do(func() {
		c.Mu.Lock()
		c.closed.Store(true)
		for p := range c.peers {
			p.closed = true
		}
		_ = c.await(context.Background(), driver.ErrClosed, func(*job) bool { return true })
		clear(c.peers)
		c.Mu.Unlock()
		var errs []error
		for _, m := range c.table.All() {
			errs = append(errs, m.revoke(context.Background())) // it has nothing to wait for
		}
		c.gate.Shut()
		c.gate.Wait()
		c.err = errors.Join(errors.Join(errs...), c.release())
	})
	return c.err
}

// release releases everything that Open made, and the files that are still open.
func (c *Core) release() error {
	var errs []error
	if c.Mover != nil {
		errs = append(errs, c.Mover.Close())
	}
	for _, f := range c.files {
		errs = append(errs, c.dropInode(f), f.close())
	}
	if c.bounce != nil {
		errs = append(errs, unmap(c.bounce))
	}
	if c.Event != nil {
		errs = append(errs, c.Event.Close())
	}
	return errors.Join(errs...)
}

// await cancels the jobs that which selects, and returns when none of them is left or the context
// has ended. It is the proof of every revoke and close: a job ends only when the Mover has none of
// its requests, and none begins after its err is set. await unlocks Mu while it waits.
//
// Preconditions: Mu is held.
func (c *Core) await(ctx context.Context, why error, which func(*job) bool) error {
	if len(c.freeJobs) == len(c.jobs) {
		return nil // no job is under way, as is usual when a memory is revoked
	}
	c.cancel(why, which)
	c.waiters++
	defer func() { c.waiters-- }()
	c.Leave()
	c.Mu.Lock()
	stop := context.AfterFunc(ctx, func() {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		c.ended.Broadcast()
	})
	defer stop()
	for c.any(which) {
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		c.ended.Wait()
	}
	return nil
}

func (c *Core) any(which func(*job) bool) bool {
	for i := range c.jobs {
		if j := &c.jobs[i]; j.by != nil && which(j) {
			return true
		}
	}
	return false
}

// cancel makes jobs end early: none of their requests begins any more, and the Mover is asked to
// end those under way.
//
// Preconditions: Mu is held.
func (c *Core) cancel(why error, which func(*job) bool) {
	for i := range c.jobs {
		if j := &c.jobs[i]; j.by != nil && j.err == nil && which(j) {
			j.err = why
		}
	}
	c.failed = true
	for i := range c.requests {
		if r := &c.requests[i]; r.job != nil && r.job.err != nil && !r.Ending.Load() {
			r.Ending.Store(true)
			c.Mover.Cancel(r)
		}
	}
	c.pump()
}
