// SPDX-License-Identifier: Apache-2.0

package engine

import "sync"

// loop runs tasks one after the other, in a goroutine that begins with the first. A task must not
// wait: it must not connect, close a Peer, or call Self.
type loop struct {
	mu      sync.Mutex // guards the fields below
	queue   []func()
	foreign int // tasks in queue that a peer has caused
	started bool
	closed  bool

	wake  chan struct{}
	ended chan struct{} // the goroutine has ended
}

// foreignMax is how many messages of a peer wait in a loop. A peer that keeps the rules
// sends a few for each slot.
const foreignMax = 1 << 10

func newLoop() *loop { return &loop{wake: make(chan struct{}, 1), ended: make(chan struct{})} }

// push hands a task to the goroutine. It reports false when the loop is closed.
func (l *loop) push(task func()) bool { return l.add(task, 0) }

// pushIfStarted pushes the task only if the loop is running.
func (l *loop) pushIfStarted(task func()) {
	l.mu.Lock()
	started := l.started
	l.mu.Unlock()
	if started {
		l.push(task)
	}
}

// pushForeign pushes a task that a peer has caused. It reports false, too, when foreignMax of these
// are in the queue.
func (l *loop) pushForeign(task func()) bool { return l.add(task, 1) }

func (l *loop) add(task func(), foreign int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || foreign > 0 && l.foreign >= foreignMax {
		return false
	}
	if !l.started {
		l.started = true
		go l.run()
	}
	l.queue = append(l.queue, task)
	l.foreign += foreign
	l.signal()
	return true
}

func (l *loop) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *loop) run() {
	defer close(l.ended)
	var tasks []func()
	for {
		l.mu.Lock()
		tasks, l.queue = l.queue, tasks[:0]
		l.foreign = 0
		closed := l.closed
		l.mu.Unlock()
		for i, task := range tasks {
			task()
			tasks[i] = nil
		}
		if len(tasks) > 0 {
			continue
		}
		if closed {
			return
		}
		<-l.wake
	}
}

// close ends the goroutine after the tasks that were pushed, and waits for that.
func (l *loop) close() {
	l.mu.Lock()
	l.closed = true
	started := l.started
	l.signal()
	l.mu.Unlock()
	if started {
		<-l.ended
	}
}

// localPeer gives a loop the engine's own Peer for local hops. It connects anew in another
// goroutine where a connection was lost. Its methods belong to the loop.
type localPeer struct {
	s          *stager
	loop       *loop
	peer       *Peer
	connecting bool
	waiting    []func(*Peer, error)
}

// with calls then with a Peer that was connected by a lane just now, at once or in a later task.
func (l *localPeer) with(by *lane, then func(*Peer, error)) {
	if l.peer != nil && l.peer.alive(by.index) {
		then(l.peer, nil)
		return
	}
	l.waiting = append(l.waiting, then)
	if l.connecting {
		return
	}
	l.connecting = true
	if !l.s.serve(func() {
		p, err := l.s.e.local()
		l.loop.push(func() { l.connected(p, err) })
	}) {
		l.connected(nil, ErrClosed)
	}
}

func (l *localPeer) connected(p *Peer, err error) {
	l.connecting = false
	if err == nil {
		l.peer = p
	}
	waiting := l.waiting
	l.waiting = nil
	for _, then := range waiting {
		then(p, err)
	}
}
