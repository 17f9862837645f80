// SPDX-License-Identifier: Apache-2.0

package posix

import "golang.org/x/sys/unix"

// mover hands requests to the kernel: io_uring, or threads.
type mover interface {
	// put, cancel, reap and listen are called with books.Mu held and make no system call.
	put(r *request)          // never more than Config.Depth at a time
	cancel(r *request)       // asks for its end; it lands all the same
	reap(out []landing) int  // takes what has landed
	listen(need, armed bool) // whether somebody is to serve what lands, and whether somebody sleeps
	tells() bool             // whether what was reaped just now has woken the sleeper, or is about to
	fixedBuffers() int32     // the registered buffer that the requests' are in, or -1
	kick()                   // has the kernel begin what was put; without the lock
	pending() bool           // whether there is something to reap; without the lock
	addFile(f *file)         // makes a file known, where that is of use
	dropFile(f *file)        // no request of it is left
	pin(mem []byte) pin      // registers memory, where that is of use
	unpin(p pin)
	close() error // nothing is in flight
}

// landing is what became of a request.
type landing struct {
	r   *request
	res int // bytes, or minus an errno
}

// reapMax is how many landings are handled under one hold of the lock.
const reapMax = 32

// serve handles what has landed and begins what there is room for.
func (b *Backend) serve() {
	rung := b.doubt.Load()
	if rung > 0 && !readable(b.event.FD()) {
		rung = 0
	}
	b.books.Mu.Lock()
	t := b.takeTray()
	list := t[:b.mover.reap(t[:])]
	told, armings := b.mover.tells() && len(list) > 0, b.armings.Load()
	if told {
		b.noteTold(rung)
	}
	scatter := false
	for _, l := range list {
		scatter = scatter || l.scatters()
	}
	if scatter { // without the lock: the requests are still ours, and so are their jobs
		b.books.Mu.Unlock()
		for _, l := range list {
			if l.scatters() {
				l.r.scatter()
			}
		}
		b.books.Mu.Lock()
		told = told && b.armings.Load() == armings // who has armed meanwhile saw neither the landing nor its job's end
	}
	for i, l := range list {
		b.land(l)
		list[i] = landing{}
	}
	b.trays = append(b.trays, t)
	b.news = b.news && !told
	b.pump()
	b.leave()
}

// noteTold notes that the kernel tells the sleeper of what was reaped, or is about to. It may
// stop to do so when it has: when the event is found signalled at a later landing, with no
// Arm in between (rung). Until then nobody knows whether the sleeper has taken the signal, or it is still to come.
func (b *Backend) noteTold(rung uint64) {
	if rung > 0 && rung == b.doubt.Load() {
		b.doubt.Store(0)
		b.armed.Store(false)
		return
	}
	b.doubt.Store(b.armings.Load())
}

// tray holds landings while they are served. There are as many as have ever been in use at
// once.
type tray [reapMax]landing

func (b *Backend) takeTray() *tray {
	n := len(b.trays)
	if n == 0 {
		return new(tray)
	}
	t := b.trays[n-1]
	b.trays = b.trays[:n-1]
	return t
}

// scatters reports whether all has come that is to be scattered.
func (l *landing) scatters() bool {
	return l.r.bounce && l.res > 0 && l.r.done+uint64(l.res) >= l.r.need
}

// leave gives the lock up, and then does what must not be done under it.
func (b *Backend) leave() {
	b.listen()
	news := b.news
	b.news = false
	b.books.Mu.Unlock()
	if news {
		b.wake()
	}
	b.mover.kick()
}

// listen has somebody look after landings that cannot wait for Poll, or wakes who sleeps.
//
// Preconditions: books.Mu is held.
func (b *Backend) listen() {
	more := b.queue.Len() > 0 || b.durables > 0
	b.mover.listen(more || b.books.Waited(), b.armed.Load())
}

// pump begins what there is room for, the jobs in turn.
//
// Preconditions: books.Mu is held.
func (b *Backend) pump() {
	b.relaunch()
	b.beginSyncs()
	for idle := 0; idle < b.queue.Len() && (len(b.free) > 0 || b.failed); {
		j := b.queue.Pop()
		before := j.at
		if b.advance(j) {
			j.queued = false
			b.settle(j)
			continue
		}
		b.queue.Push(j)
		if idle++; j.at != before {
			idle = 0
		}
	}
	b.failed = false
}

// advance makes requests of a job, as many as it may in its turn. It reports whether
// there is nothing to make any more.
func (b *Backend) advance(j *job) bool {
	for range turnMax {
		if j.Err != nil || j.at.piece == len(j.Items) {
			return true
		}
		if len(b.free) == 0 {
			return false
		}
		r := b.cut(j)
		if r == nil {
			return false
		}
		j.flying++
		b.launch(r)
	}
	return false
}

func (b *Backend) launch(r *request) {
	if r.kind == writeFrom {
		r.f.inode.writing[r.access()]++
	}
	b.mover.put(r)
}

// relaunch hands requests over once more. One that is of another kind now, through the page
// cache in place of past it, waits until those past it have ended.
func (b *Backend) relaunch() {
	kept := b.again[:0]
	for _, r := range b.again {
		switch {
		case r.kind == syncFile:
			b.launch(r)
		case !r.f.inode.mayRelaunch(r):
			kept = append(kept, r)
		default:
			if r.kind == writeFrom {
				r.f.inode.waiting[r.access()]--
			}
			b.launch(r)
		}
	}
	clear(b.again[len(kept):])
	b.again = kept
}

// land handles the end of a request, which may be the beginning of another try.
func (b *Backend) land(l landing) {
	r := l.r
	if r.kind == writeFrom {
		r.f.inode.writing[r.access()]--
	}
	again, err := r.judge(l.res)
	if again {
		if b.again = append(b.again, r); r.kind == writeFrom {
			r.f.inode.waiting[r.access()]++
		}
		return
	}
	j, inode, sync := r.j, r.inode, r.kind == syncFile
	r.release()
	b.free = append(b.free, r)
	if sync {
		b.synced(inode, err)
		return
	}
	j.flying--
	if err != nil {
		b.fail(j, err)
	}
	b.settle(j)
}

func (b *Backend) fail(j *job, err error) {
	if j.Err == nil {
		j.Err = err
	}
	b.failed = true
}

// settle completes a job that has nothing under way and nothing to begin.
func (b *Backend) settle(j *job) {
	if j.queued || j.flying > 0 || j.syncs > 0 {
		return
	}
	if j.Err == nil && j.durable && !j.synced {
		b.askSyncs(j)
		b.beginSyncs()
		return
	}
	for i := range j.Views {
		if n := j.Views[i].Remote.Extent.file.inode; n.turn == j {
			n.turn = nil
		}
	}
	tag, err := j.Tag, j.Err
	if j.durable {
		b.durables--
	}
	j.Clear()
	b.freeJobs = append(b.freeJobs, j)
	b.done.Push(tag, err)
	b.news = true
	b.books.Ended()
}

// stop ends requests of jobs that have failed, and begins no more of them.
//
// Preconditions: books.Mu is held.
func (b *Backend) stop() {
	b.failed = true
	for i := range b.requests {
		if r := &b.requests[i]; r.j != nil && r.j.Err != nil && !r.ending.Load() {
			r.ending.Store(true)
			b.mover.cancel(r)
		}
	}
	b.pump()
}

// readable reports whether an eventfd is signalled.
func readable(fd int) bool {
	poll := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(poll[:], 0)
	return n == 1 && err == nil
}
