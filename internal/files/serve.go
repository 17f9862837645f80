// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sluicehq/sluice/driver"
)

// Landing is what became of a request.
type Landing struct {
	R   *Request
	N   int   // bytes, of a read or a write without an error
	Err error // why nothing was done: a syscall.Errno, or the library's
}

// tray holds landings while they are served. There are as many as have ever been in use at once.
type tray [ReapMax]Landing

const (
	// ReapMax is how many landings are served under one hold of the lock.
	ReapMax = 32
	// turnMax is how many requests of one job begin before the next job has its turn.
	turnMax    = 32
	retriesMax = 1000 // of a request that was neither done nor refused
)

// Serve takes requests that have landed, completes their jobs and begins what there is room for.
// Poll calls it, and after Mover.Listen(true) the Mover does, from any goroutine.
func (c *Core) Serve() {
	c.Mu.Lock()
	if len(c.trays) == 0 {
		c.trays = append(c.trays, new(tray))
	}
	t := c.trays[len(c.trays)-1]
	c.trays = c.trays[:len(c.trays)-1]
	list := t[:c.Mover.Reap(t[:])]

	// What came into buffers goes to where it belongs, without the lock: the requests are still
	// ours, and so are their jobs.
	scatters := func(l *Landing) bool {
		return l.R.Bounce && l.Err == nil && l.N > 0 && l.R.Done+uint64(l.N) >= l.R.need
	}
	bounced := false
	for i := range list {
		bounced = bounced || scatters(&list[i])
	}
	if bounced {
		c.Mu.Unlock()
		for i := range list {
			if l := &list[i]; scatters(l) && l.R.scatter() != nil {
				l.Err = syscall.EFAULT
			}
		}
		c.Mu.Lock()
	}

	// Each request has ended, or is to be tried again with what is left.
	for i := range list {
		r := list[i].R
		if r.Kind == Write {
			r.File.inode.writing[r.access()]--
		}
		again, err := r.judge(&list[i], c.AnyReads)
		list[i] = Landing{}
		if !again {
			c.end(r, err)
		} else if c.again = append(c.again, r); r.Kind == Write {
			r.File.inode.waiting[r.access()]++
		}
	}
	c.trays = append(c.trays, t)
	c.pump()
	c.Leave()
}

// end makes a request free, and completes its job if it was the last.
func (c *Core) end(r *Request, err error) {
	j, inode := r.job, r.inode
	r.release()
	c.free = append(c.free, r)
	if j == nil {
		c.synced(inode, err)
		return
	}
	if j.flying--; err != nil {
		c.fail(j, err)
	}
	c.settle(j)
}

// pump begins what there is room for: what is to be tried again, syncs, and the next requests of
// jobs, in turn.
//
// Preconditions: Mu is held, and Leave follows.
func (c *Core) pump() {
	// A write that goes through the page cache now, in place of past it, waits until those past it
	// have ended.
	kept := c.again[:0]
	for _, r := range c.again {
		over := r.job != nil && r.job.err != nil
		if r.Kind == Write {
			if !over && r.File.inode.writing[1-r.access()] > 0 {
				kept = append(kept, r)
				continue
			}
			r.File.inode.waiting[r.access()]--
		}
		if over {
			c.end(r, nil)
		} else {
			c.launch(r)
		}
	}
	clear(c.again[len(kept):])
	c.again = kept
	c.beginSyncs()

	for idle := 0; idle < c.queue.n && (len(c.free) > 0 || c.failed); {
		j := c.queue.pop()
		before := j.at
		for n := 0; n < turnMax && j.err == nil && j.at.item < len(j.items) && len(c.free) > 0 &&
			c.cut(j); n++ {
		}
		if j.err != nil || j.at.item == len(j.items) {
			j.queued = false
			c.settle(j)
			idle = 0 // it may have had the turn that another waits for
			continue
		}
		c.queue.push(j)
		if idle++; j.at != before {
			idle = 0
		}
	}
	c.failed = false
}

func (c *Core) launch(r *Request) {
	if r.Kind == Write {
		r.File.inode.writing[r.access()]++
	}
	c.Mover.Put(r)
}

// settle completes a job that has nothing under way and nothing to begin; a durable one asks for
// its syncs first.
func (c *Core) settle(j *job) {
	if j.queued || j.flying > 0 || j.syncs > 0 {
		return
	}
	if j.err == nil && j.durable && !j.synced {
		c.askSyncs(j)
		return
	}
	for i := range j.views {
		if n := j.views[i].remote.File.inode; n.turn == j {
			n.turn = nil
		}
	}
	if j.durable {
		c.durables--
	}
	tag, err := j.tag, j.err
	j.clear()
	c.freeJobs = append(c.freeJobs, j)
	c.done.Push(tag, err)
	c.news = true
	if c.waiters > 0 {
		c.ended.Broadcast()
	}
}

// fail has a job end before it is done.
func (c *Core) fail(j *job, err error) {
	if j.err == nil {
		j.err = err
	}
	c.failed = true
}

// Leave gives the lock up, and then does what must not be done under it: it wakes the sleeper, and
// has the Mover begin what was put. Landings cannot wait for Poll where more is to be begun, or a
// caller waits for an end.
func (c *Core) Leave() {
	c.Mover.Listen(c.queue.n > 0 || c.durables > 0 || c.waiters > 0)
	news := c.news
	c.news = false
	c.Mu.Unlock()
	if news {
		c.Mover.Wake()
	}
	c.Mover.Kick()
}

// judge says what to do after a request has landed: to try it again with what is left, or to end
// it, with an error or without.
func (r *Request) judge(l *Landing, anyReads bool) (again bool, err error) {
	if l.Err != nil {
		return r.refused(l.Err, anyReads)
	}
	switch {
	case r.Kind == Sync:
		return false, nil
	case uint64(l.N) > r.N-r.Done:
		return false, r.failure(fmt.Errorf("%d bytes were moved of %d: %w", l.N, r.N-r.Done,
			driver.ErrCorrupt))
	case l.N == 0:
		return false, r.stuck()
	}
	r.advance(uint64(l.N))
	switch {
	case r.Done >= r.need, r.job.err != nil:
		return false, nil
	case !r.Past || r.Done&(r.File.Block-1) == 0:
	case r.Kind == Write:
		r.Past = false // the rest of the block goes through the page cache, and what follows it
	case !anyReads:
		return false, r.stuck() // past the page cache only the end of a file lies within a block
	}
	return true, nil
}

// refused judges a request of which nothing was done.
func (r *Request) refused(why error, anyReads bool) (again bool, err error) {
	switch {
	case r.job != nil && r.job.err != nil:
		return false, nil
	case errors.Is(why, syscall.EINTR), errors.Is(why, syscall.EAGAIN),
		errors.Is(why, syscall.ECANCELED), errors.Is(why, driver.ErrAborted):
		// Not by us: the kernel also cancels what a thread had begun that has ended.
		if r.retries++; r.retries < retriesMax {
			return true, nil
		}
	case errors.Is(why, syscall.EFAULT):
		why = driver.ErrFault
	case errors.Is(why, syscall.EINVAL) && r.Past && !anyReads:
		// O_DIRECT was granted by open, and is not by this filesystem: all further requests go
		// through the page cache. The descriptor stays: others may be under way.
		r.File.refused = true
		r.File.Why = "the filesystem refuses O_DIRECT at work: " + why.Error()
		r.Past = false
		return true, nil
	}
	return false, r.failure(why)
}

// stuck is the error of a request of which no more is done.
func (r *Request) stuck() error {
	if r.Kind == Read {
		return r.failure(io.ErrUnexpectedEOF)
	}
	return r.failure(io.ErrShortWrite)
}

// failure names file, offset and piece.
func (r *Request) failure(cause error) error {
	if r.Kind == Sync {
		return &driver.FileError{Op: "sync", Name: name(r.inode.sync, ID{}), Off: -1, Err: cause}
	}
	e := &driver.FileError{Op: r.Kind.String(), Name: r.File.Name(), Off: int64(r.Off + r.Done),
		Err: cause}
	c := r.first
	at := r.job.place(c)
	for uint64(e.Off) >= at.off+at.n {
		next := cursor{item: c.item + 1}
		if next.item > r.last.item || next == r.last {
			break
		}
		c, at = next, r.job.place(next)
	}
	if uint64(e.Off) < at.off { // in the gap before it
		e.Off = int64(at.off)
	}
	return &driver.PieceError{Piece: int(r.job.items[c.item].index), Err: e}
}
