// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	enc "encoding/binary" // the tests have a variable of that name
	"errors"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// cacheUser is a client of a server, with an engine and memory of its own.
type cacheUser struct {
	*serve.Client
	engine *engine.Engine
	memory *engine.Memory
	region *engine.Region
}

// hold has memory for blocks, which the server may reach.
func (u *cacheUser) hold(ctx context.Context, bytes int) (err error) {
	if u.memory, err = u.engine.Alloc(uint64(bytes), engine.AllocOptions{}); err != nil {
		return err
	}
	if u.region, err = u.engine.RegisterPrivate("blocks", u.memory.Segment()); err != nil {
		return err
	}
	return u.Attach(ctx, u.region)
}

// close ends a user. Memory that the server may still reach stays.
func (u *cacheUser) close() error {
	soon, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := errors.Join(u.Client.Close(soon), u.engine.Close())
	if err == nil && u.memory != nil {
		err = u.memory.Close()
	}
	return err
}

// modelUser is a user as a process that serves a model is one: its memory has room for blocks of
// one length, whose content follows from their keys.
type modelUser struct {
	*cacheUser
	*serve.Space
	block int // bytes
}

// openModelUser has a user with room for so many blocks meet the cache at a Unix socket.
func openModelUser(ctx context.Context, socket, name string, block, room int) (*modelUser, error) {
	u, err := (&cacheFlags{server: socket}).dial(ctx, name)
	if err != nil {
		return nil, err
	}
	m := &modelUser{cacheUser: u, block: block}
	if err = u.hold(ctx, block*room); err == nil {
		m.Space, err = u.Namespace(ctx, "model", [32]byte{})
	}
	if err != nil {
		return nil, errors.Join(err, u.close())
	}
	return m, nil
}

// place is where the first n blocks of a length lie.
func (u *cacheUser) place(n, block int) serve.Place {
	p := serve.Place{Region: u.region, Stride: uint64(block), Run: uint64(block)}
	for k := range n {
		p.Slots = append(p.Slots, uint32(k))
	}
	return p
}

// wordOf is the word at a place in the content of a key, of 8 bytes.
func wordOf(key *cache.Key, at int) uint64 {
	a, b := enc.LittleEndian.Uint64(key[:]), enc.LittleEndian.Uint64(key[8:])
	v := (a + uint64(at)*0x9e3779b97f4a7c15) ^ b*0xd6e8feb86659fd93
	return v ^ v>>29
}

// fill has the first blocks be what their keys say.
func (u *modelUser) fill(keys []cache.Key) {
	for k := range keys {
		p := u.memory.Bytes()[k*u.block:][:u.block]
		for at := 0; at+8 <= len(p); at += 8 {
			enc.LittleEndian.PutUint64(p[at:], wordOf(&keys[k], at))
		}
	}
}

// is reports whether block k is what its key says, and clears it, so that one that does not come
// the next time is noticed.
func (u *modelUser) is(k int, key *cache.Key) bool {
	p := u.memory.Bytes()[k*u.block:][:u.block]
	defer clear(p)
	for at := 0; at+8 <= len(p); at += 8 {
		if enc.LittleEndian.Uint64(p[at:]) != wordOf(key, at) {
			return false
		}
	}
	return true
}

// served is what became of a request: blocks that were loaded, those of them whose bytes were
// others, blocks that were stored, and the time of Match, Load and Store; 0: there was none.
type served struct {
	hits, wrong, stored int
	took                [3]time.Duration
}

// serve does with a request what a process that serves a model does, room blocks at a time: it
// loads what is there, and stores the rest.
func (u *modelUser) serve(ctx context.Context, keys []cache.Key, room int) (r served, err error) {
	begin := time.Now()
	m, err := u.Match(ctx, keys)
	r.took[0] = time.Since(begin)
	for at, end := 0, 0; err == nil && at < len(keys); at = end {
		what, call := 1, u.Load
		if end = min(at+room, m.Prefix); at >= m.Prefix {
			what, call, end = 2, u.Store, min(at+room, len(keys))
			u.fill(keys[at:end])
		}
		var outcomes []cache.Outcome
		begin := time.Now()
		for {
			outcomes, err = call(ctx, keys[at:end], u.place(end-at, u.block))
			if !errors.Is(err, engine.ErrBusy) || ctx.Err() != nil {
				break
			}
			time.Sleep(time.Millisecond) // the disk does not keep up
			begin = time.Now()
		}
		r.took[what] += time.Since(begin)
		for k, o := range outcomes {
			switch {
			case o != cache.Done:
			case what == 2:
				r.stored++
			default:
				r.hits++
				if !u.is(k, &keys[at+k]) {
					r.wrong++
				}
			}
		}
	}
	return r, err
}
