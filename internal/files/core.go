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

// Config is what the core is told of its backend.
type Config struct {
	Caps    driver.Caps
	Can     driver.Can
	Memory  string // what it moves files from and to: "host memory"
	Disk    string // what may not answer: "the disk"
	KeysMax int    // memories at a time
	JobsMax int    // tags accepted and not yet polled
	Depth   int    // requests with the Mover at a time

	PieceMax  uint64 // bytes of one request
	CachedMax uint64 // of one write through the page cache
	SplitMin  uint64 // bytes of whole blocks within a piece that are worth a request apart
	GapMax    int    // bytes between two entries that a buffered read takes along; negative: none
	PlacesMax int    // places in memory of one request, at most 64

	// AnyReads says that the Mover reads at any alignment past the page cache, so that no read
	// needs a buffer, and that nothing refuses O_DIRECT at work.
	AnyReads bool
	Buffered bool // all bytes go through the page cache
	Durable  bool // every write is durable
}

// Mover hands requests to what moves the bytes: io_uring, threads or cuFile.
type Mover interface {
	// Put begins a request, at the next Kick at the latest; it lands once. It and Cancel, Reap
	// and Listen are called with Core.Mu held, and make no system call.
	Put(r *Request)
	// Cancel asks for the end of a request, whose Ending is set. It lands all the same.
	Cancel(r *Request)
	// Reap takes requests that have landed.
	Reap(out []Landing) int
	// Listen says whether landings must be served although nobody polls.
	Listen(need bool)

	// Kick begins what was put.
	Kick()
	// Pending reports whether there is something to reap.
	Pending() bool
	// Arm has the next landing, or the next Wake, signal Core.Event, and reports whether there is
	// something to reap already.
	Arm() (pending bool)
	// Wake signals Core.Event if Arm has asked for it since.
	Wake()

	// AddFile makes a file known. Core.Mu is held.
	AddFile(f *File) error
	// DropFile undoes AddFile. After an error it may be called again. Core.Mu is held.
	DropFile(f *File) error
	// AddMemory makes memory of the program known.
	AddMemory(m *Memory, seg *driver.Segment) error
	// DropMemory undoes AddMemory. After an error it may be called again.
	DropMemory(m *Memory) error
	// Explain is Peer.Explain; remote may be nil. Core.Mu is held.
	Explain(local, remote *Memory) string
	// Close gives all back. Nothing is under way.
	Close() error
}

// Core is what is under way between memory and files. Movers use it; programs see the Backend.
type Core struct {
	Config
	Mu    sync.Mutex
	Event *proc.Event // a goroutine that has armed sleeps on it
	Mover Mover

	gate    session.Gate // held by users of Mover
	done    session.Completions
	owner   session.Owner
	addr    []byte
	table   session.KeyTable[Memory]
	closed  atomic.Bool
	closing sync.Once
	err     error // of Close
	foreign error // of a local key that is a file, or a token that is not
	distant error // of another process
	bounce  []byte

	// Guarded by Mu.
	news     bool // completions of which no sleeper was told
	peers    map[*Peer]struct{}
	files    map[fileKey]*File
	inodes   map[inodeKey]*inode
	jobs     []job
	freeJobs []*job
	queue    turns // jobs with pieces that no request was made of
	failed   bool  // jobs in the queue may have failed
	requests []Request
	free     []*Request
	again    []*Request // to be handed to the Mover once more
	trays    []*tray
	unsynced []*inode // jobs wait for a sync that has not begun
	durables int      // jobs that end with a sync
	// for each of these a goroutine begins what is in the queue when a Renew is over
	returning map[driver.Shared]struct{}
	ended     sync.Cond // a job has
	waiters   int       // for that
}

var errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)

// Backend is a driver.Backend that stands on a core.
type Backend struct {
	driver.BackendBase
	core *Core
}

// Open makes a backend. open makes the mover for it.
func Open(cfg Config, open func(*Core) (Mover, error)) (Backend, error) {
	name := cfg.Caps.Name
	c := &Core{Config: cfg, owner: session.NewOwner(), peers: map[*Peer]struct{}{},
		files: map[fileKey]*File{}, inodes: map[inodeKey]*inode{},
		returning: map[driver.Shared]struct{}{}}
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

// Request returns the request of a slot.
func (c *Core) Request(slot int) *Request { return &c.requests[slot] }

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.core.Caps }

// Addr implements driver.Backend. It opens nothing in another process.
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

// Arm implements driver.Backend. The Mover notes the wish before it looks, and whoever brings a
// completion looks for the wish afterwards.
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

// Close implements driver.Backend. It ends all jobs and waits for what the disks have in hand,
// closes peers and memories, and lets no caller through to the Mover any more.
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

// release gives back what Open made, and what the Mover did not give up before its end.
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

// await ends the jobs that which picks, and returns when none is left or the context has ended. It
// is the proof of every revoke, cancel and close: a job is over when none of its requests is with
// the Mover, and none begins once its err is set. It gives the lock up meanwhile, and looks
// whenever a job has ended.
//
// Preconditions: Mu is held.
func (c *Core) await(ctx context.Context, why error, which func(*job) bool) error {
	if len(c.freeJobs) == len(c.jobs) {
		return nil // none is under way: mostly so where a memory is closed
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

// cancel has jobs end as early as can be: no more of their requests begin, and the Mover is asked
// for the end of those that have.
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
