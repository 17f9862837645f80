// SPDX-License-Identifier: Apache-2.0

// Command pages moves 2,048 scattered entries of a paged KV cache as one pattern: two lists of
// numbers, not 2,048 copies. Both engines are in this process for brevity.
//
//	go run ./examples/pages
package main

import (
	"bytes"
	"context"
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
	prefill, local := open("prefill")
	decode, arrived := open("decode")
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
	remote, err := peer.Remote("kv")
	check(err)

	t, err := prefill.NewTransfer(peer, engine.Write, engine.Route{})
	check(err)
	from, to := places(), places()
	check(t.AddPages(local, remote, engine.Pages{
		Count: moved, EntryLen: block, LocalStride: block, RemoteStride: block,
		Local: from, Remote: to, // the transfer keeps these slices: do not change them
	}))
	check(t.Post())
	check(t.Wait(ctx))

	for i := range from {
		if !bytes.Equal(at(local, from[i]), at(arrived, to[i])) {
			log.Fatalf("entry %d does not have the bytes that were sent", i)
		}
	}
	fmt.Printf("%d blocks of %d bytes are in place\n", moved, block)
}

// places returns the numbers of distinct blocks in random order, as a block pool would.
func places() []uint32 {
	list := make([]uint32, moved)
	for i, p := range rand.Perm(blocks)[:moved] {
		list[i] = uint32(p)
	}
	return list
}

func at(r *engine.Region, i uint32) []byte { return r.Bytes()[i*block:][:block] }

func open(name string) (*engine.Engine, *engine.Region) {
	b, err := shm.New(shm.Config{})
	check(err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	check(err)
	// the memory is freed when the process ends
	memory, err := e.Alloc(blocks*block, engine.AllocOptions{Populate: true})
	check(err)
	region, err := e.Register("kv", memory.Segment())
	check(err)
	return e, region
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
