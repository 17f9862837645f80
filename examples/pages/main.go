// SPDX-License-Identifier: Apache-2.0

// Command pages moves 2,048 scattered blocks of a paged KV cache as one pattern: two lists of
// numbers, not 2,048 copies. Decode leases the memory to prefill for that one request, and revokes
// the lease afterwards: then no write of prefill can land there, so that decode may use the memory
// for another request. Both engines are in this process for brevity.
//
//	go run ./examples/pages
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// The cache has 4,096 blocks of 656 bytes each, of which the program moves 2,048.
const blocks, block, moved = 4096, 656, 2048

func main() {
	prefill, local := open("prefill", (*engine.Engine).Register)
	// not in the description: peers reach it only by leases
	decode, pool := open("decode", (*engine.Engine).RegisterPrivate)
	defer prefill.Close()
	defer decode.Close()
	for i := range local.Bytes() {
		local.Bytes()[i] = byte(i / block * 7)
	}

	ctx := context.Background()
	description, err := decode.Describe()
	check(err)
	peer, err := prefill.Connect(ctx, description)
	check(err)

	// decode leases the second half of its pool; TTL would limit the time of the lease
	const at, size = blocks / 2 * block, blocks / 2 * block
	lease, err := pool.Lease(at, size, engine.LeaseOptions{})
	check(err)
	remote, err := peer.Import(lease.Token()) // decode sends these bytes with the request
	check(err)

	t, err := prefill.NewTransfer(peer, engine.Write, engine.Route{})
	check(err)
	from, to := places(blocks), places(blocks/2) // offsets count from the start of the lease
	check(t.AddPages(local, remote, engine.Pages{
		Count: moved, EntryLen: block, LocalStride: block, RemoteStride: block,
		Local: from, Remote: to, // the transfer keeps these slices: do not change them
	}))
	if err := t.Add(local, 0, remote, size, 1); errors.Is(err, engine.ErrBounds) {
		fmt.Println("past the end of the lease: refused")
	}
	check(t.Post())
	check(t.Wait(ctx))
	leased := pool.Bytes()[at:]
	for i := range from {
		if !bytes.Equal(local.Bytes()[from[i]*block:][:block], leased[to[i]*block:][:block]) {
			log.Fatalf("block %d does not have the bytes that were sent", i)
		}
	}
	fmt.Printf("%d blocks of %d bytes are in place\n", moved, block)

	check(lease.Revoke(ctx)) // works even if prefill is frozen or dead
	clear(leased)
	check(t.Post())
	if err := t.Wait(ctx); errors.Is(err, engine.ErrRevoked) &&
		bytes.Count(leased, []byte{0}) == len(leased) {
		fmt.Println("after Revoke: refused")
	}
}

// places returns moved distinct numbers below n in random order, as a block pool would.
func places(n int) []uint32 {
	list := make([]uint32, moved)
	for i, p := range rand.Perm(n)[:moved] {
		list[i] = uint32(p)
	}
	return list
}

// register is one of the two ways to make memory known.
type register func(*engine.Engine, string, driver.Segment) (*engine.Region, error)

func open(name string, add register) (*engine.Engine, *engine.Region) {
	b, err := shm.New(shm.Config{})
	check(err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	check(err)
	// the memory is freed when the process ends
	memory, err := e.Alloc(blocks*block, engine.AllocOptions{Populate: true})
	check(err)
	region, err := add(e, "kv", memory.Segment())
	check(err)
	return e, region
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
