// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/backends"
)

// Submit implements backends.Peer. It takes a batch and hands its first requests over, with one crossing into C.
func (p *peer) Submit(op backends.Op, tag uint64, descs []backends.Desc) error {
	b := p.b
	if !b.gate.Enter() {
		return backends.ErrClosed
	}
	defer b.gate.Exit()
	b.mu.Lock()
	if err := p.accept(op, tag, descs); err != nil {
		b.mu.Unlock()
		return err
	}
	b.pump()
	b.leave()
	return nil
}

// accept makes a job of a batch, or says why not.
func (p *peer) accept(op backends.Op, tag uint64, descs []backends.Desc) error {
	b := p.b
	if p.closed {
		return backends.ErrClosed
	}
	if op != backends.Read && op != backends.Write {
		return backends.ErrNotSupported
	}
	if len(b.freeJobs) == 0 || !b.done.Take() { // a job for each place, but those that wait for Poll
		return backends.ErrFull
	}
	j := b.freeJobs[len(b.freeJobs)-1]
	if err := p.look(j, op, descs); err != nil {
		j.clear()
		b.done.GiveBack()
		return err
	}
	b.freeJobs = b.freeJobs[:len(b.freeJobs)-1]
	j.set(descs)
	j.p, j.op, j.tag, j.live, j.queued = p, op, tag, true, true
	j.at, j.flying = cursor{}, 0
	b.queue.push(j)
	return nil
}

// look checks all descriptors and finds the memories of each stretch that has the same.
func (p *peer) look(j *job, op backends.Op, descs []backends.Desc) error {
	if len(descs) == 0 || len(descs) > descsMax {
		return backends.ErrBounds
	}
	for i := range descs {
		d := &descs[i]
		if n := len(j.views); n == 0 || !j.views[n-1].shows(d.LocalKey, d.RemoteKey) {
			v, err := p.find(op, d.LocalKey, d.RemoteKey)
			if err != nil {
				return err
			}
			j.views = append(j.views, v)
		}
		v := &j.views[len(j.views)-1]
		if d.Len == 0 || !within(d.Local, d.Len, v.local.size) || !within(d.Remote, d.Len, v.remote.m.size) {
			return d.Check(v.local.size, v.remote.m.size)
		}
	}
	return nil
}

func within(off, n, size uint64) bool { return off <= size && n <= size-off }

// find finds both memories of a pair of keys.
func (p *peer) find(op backends.Op, localKey, remoteKey uint32) (view, error) {
	local := p.b.table.At(localKey)
	if local == nil || uint64(remoteKey) >= uint64(len(p.imports)) || p.imports[remoteKey].m == nil {
		return view{}, errUnknownKey
	}
	r := p.imports[remoteKey]
	switch {
	case local.file != nil:
		return view{}, errNotLocal
	case r.m.closed || r.epoch != r.m.epoch:
		return view{}, backends.ErrRevoked
	case op == backends.Write && r.m.readOnly:
		return view{}, backends.ErrReadOnly
	}
	return view{localKey, remoteKey, local, r}, nil
}
