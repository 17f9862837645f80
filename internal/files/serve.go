// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sluicehq/sluice/driver"
)

// Landing is the result of a request that the Mover has finished.
type Landing struct {
	R   *Request
	N   int   // bytes moved by a read or a write
	Err error // if no byte was moved: a syscall.Errno, or an error of the library
}

// tray is a buffer for landings. Serve allocates one for each goroutine that is inside, and keeps
// them.
type tray [ReapMax]Landing

const (
	// ReapMax bounds the landings that one call of Serve handles.
	ReapMax = 32
	// turnMax bounds the requests of one job that begin before the next job has its turn.
	turnMax = 32
	// retriesMax bounds the attempts of a request that is interrupted (EINTR, EAGAIN, ECANCELED).
	retriesMax = 1000
)

// Serve takes finished requests from the Mover, completes their jobs and begins further requests.
// Poll calls it; after Mover.Listen(true) the Mover calls it, too, from any goroutine.
func (c *Core) Serve() {
	c.Mu.Lock()
	if len(c.trays) == 0 {
		c.trays = append(c.trays, new(tray))
	}
	t := c.trays[len(c.trays)-1]
	c.trays = c.trays[:len(c.trays)-1]
	list := t[:c.Mover.Reap(t[:])]

	// Copy bounced reads to their memory, without the lock: no other goroutine uses these requests
	// or ends their jobs before the loop below.
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

	// End each request, or queue it for another attempt at the remaining bytes.
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

// end frees a request, and completes its job if this was its last request.
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

// pump begins as many requests as are free: first those that need another attempt, then syncs, then
// the next requests of the queued jobs, in turn.
//
// Preconditions: Mu is held, and Leave follows.
func (c *Core) pump() {
	// A write that now uses the page cache, after it failed to bypass it, waits until all writes
	// that bypass it have ended.
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
			idle = 0 // it may have been inode.blocked, so that another job could not write
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

// settle completes a job that has no request under way and none to begin. If the job is durable and
// has not been synced, settle asks for its syncs instead.
func (c *Core) settle(j *job) {
	if j.queued || j.flying > 0 || j.syncs > 0 {
		return
	}
	if j.err == nil && j.durable && !j.synced {
		c.askSyncs(j)
		return
	}
	for i := range j.views {
		if n := j.views[i].remote.File.inode; n.blocked == j {
			n.blocked = nil
		}
	}
	if j.durable {
		c.durables--
	}
	if c.helped != j { // the engine polls after Help
		c.news = true
	} else {
		c.helped = nil
	}
	tag, err := j.tag, j.err
	j.clear()
	c.freeJobs = append(c.freeJobs, j)
	c.done.Push(tag, err)
	if c.waiters > 0 {
		c.ended.Broadcast()
	}
}

// fail makes a job end early with an error; the first error counts.
func (c *Core) fail(j *job, err error) {
	if j.err == nil {
		j.err = err
	}
	c.failed = true
}

// Leave unlocks Mu, then wakes the program if there are completions, and makes the Mover begin the
// requests that were put. It also tells the Mover whether it must call Serve itself: this is so
// while further requests must begin, or a caller waits for the end of a job, since the program may
// not poll meanwhile.
func (c *Core) Leave() {
	c.unlock()
	c.Mover.Kick()
}

// unlock is Leave without Kick.
func (c *Core) unlock() {
	c.Mover.Listen(c.waiters > 0 || !c.Helped() && (c.queue.n > 0 || c.durables > 0))
	news := c.news
	c.news = false
	c.Mu.Unlock()
	if news {
		c.Mover.Wake()
	}
}

// judge decides what follows a landing: another attempt at the remaining bytes, or the end of the
// request, with or without an error.
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
	case !r.Direct || r.Done&(r.File.Block-1) == 0:
	case r.Kind == Write: // the rest of it goes through the page cache
		if err := r.leaveDirect(); err != nil {
			return false, r.failure(err)
		}
	case !anyReads:
		return false, r.stuck() // a direct read stops inside a block only at the end of the file
	}
	return true, nil
}

// refused decides what follows a landing with an error.
func (r *Request) refused(why error, anyReads bool) (again bool, err error) {
	switch {
	case r.job != nil && r.job.err != nil:
		return false, nil
	case errors.Is(why, syscall.EINTR), errors.Is(why, syscall.EAGAIN),
		errors.Is(why, syscall.ECANCELED), errors.Is(why, driver.ErrAborted):
		// The core did not cancel it: the kernel also cancels requests of a thread that has exited.
		if r.retries++; r.retries < retriesMax {
			return true, nil
		}
	case errors.Is(why, syscall.EFAULT):
		why = driver.ErrFault
	case errors.Is(why, syscall.EINVAL) && r.Direct && !anyReads:
		// open accepted O_DIRECT, but the filesystem refuses it for this request. All further
		// requests go through the page cache. The descriptor stays open, since other requests may
		// be using it.
		r.File.refused = true
		r.File.Why = "the filesystem refuses O_DIRECT at work: " + why.Error()
		if why = r.leaveDirect(); why == nil {
			return true, nil
		}
	}
	return false, r.failure(why)
}

// leaveDirect has what is left of a request go through the page cache.
func (r *Request) leaveDirect() error {
	r.Direct = false
	return r.File.plain()
}

// stuck returns the error of a request that makes no progress.
func (r *Request) stuck() error {
	if r.Kind == Read {
		return r.failure(io.ErrUnexpectedEOF)
	}
	return r.failure(io.ErrShortWrite)
}

// failure wraps an error with the file, the offset, and the index of the failed descriptor.
func (r *Request) failure(cause error) error {
	if r.Kind == Sync {
		return &driver.FileError{Op: "sync", Name: name(r.inode.sync, ID{}), Off: -1, Err: cause}
	}
	e := &driver.FileError{Op: r.Kind.String(), Name: r.File.Name(), Off: int64(r.offset()),
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
	if uint64(e.Off) < at.off { // the failed byte is in the gap before this item
		e.Off = int64(at.off)
	}
	return &driver.PieceError{Piece: int(r.job.items[c.item].index), Err: e}
}
