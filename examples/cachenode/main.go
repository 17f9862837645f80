// SPDX-License-Identifier: Apache-2.0

// Command cachenode is a program on the KV cache of its node: it dials the cache, stores the blocks
// of a prompt that are not there yet, and loads all of them. Without a socket it opens a cache of
// its own in a file, and serves it to itself.
//
//	go run ./examples/cachenode [SOCKET]
package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

const slots, block = 8, 64 << 10 // of the memory that the model is served from

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	socket := filepath.Join("/dev/shm", fmt.Sprintf("cachenode-%d", os.Getpid()))
	if len(os.Args) > 1 {
		socket = os.Args[1]
	} else {
		defer serveCache(ctx, socket)()
	}

	e := open("model")
	defer e.Close()
	client := must(serve.Dial(ctx, e, "unix", socket)) // waits for a server that starts
	defer client.Close(ctx)
	memory := must(e.Alloc(slots*block, engine.AllocOptions{}))
	region := must(e.RegisterPrivate("kv", memory.Segment()))
	check(client.Attach(ctx, region)) // the cache may reach it until Detach, or Close
	// alike for all that may share a block: the model, its layout, the salt of a tenant
	space := must(client.Namespace(ctx, "model", sha256.Sum256([]byte("llama-70b, bf16, page 16"))))
	place := serve.Place{Region: region, Stride: block, Run: block} // of slot k: bytes from k*block
	keys := make([]cache.Key, 4)
	for k := range keys {
		keys[k] = cache.KeyOf(fmt.Appendf(nil, "the tokens of all blocks up to %d", k))
		copy(region.Bytes()[k*block:], fmt.Sprintf("block %d", k))
	}

	found := must(space.Match(ctx, keys))
	place.Slots = []uint32{0, 1, 2, 3}[found.Prefix:] // one for each key
	stored := must(space.Store(ctx, keys[found.Prefix:], place))
	place.Slots = []uint32{7, 6, 5, 4}
	loaded := must(space.Load(ctx, keys, place))
	fmt.Printf("%d there, stored %v, loaded %v: %s\n", found.Prefix, stored, loaded,
		region.Bytes()[4*block:][:7])
}

// serveCache opens a cache and serves it at a socket, until what it returns is called.
func serveCache(ctx context.Context, socket string) (end func()) {
	e := open("node")
	c := must(cache.Open(ctx, cache.Config{Engine: e, // Disks: behind the memory
		Memory: cache.MemoryConfig{Path: socket + ".kv", Bytes: 64 << 20}}))
	s := must(serve.New(serve.Config{Cache: c, Engine: e}))
	l := must(net.Listen("unix", socket))
	go s.Run(ctx) // both end with the engine
	go e.Serve(ctx, l)
	return func() { check(c.Close()); check(e.Close()); check(os.Remove(socket + ".kv")) }
}

func open(name string) *engine.Engine {
	b := must(shm.New(shm.Config{})) // disks need posix beside it, other hosts tcp
	return must(engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}}))
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
