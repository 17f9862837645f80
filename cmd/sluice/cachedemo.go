// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
)

// What the demonstration stores: so many clients chains of blocks each, until so many blocks are
// committed. The cache has room for all that can come until the clients notice.
const (
	demoClients = 4
	demoChain   = 16
	demoBlock   = 64 << 10
	demoEnough  = 800
	demoRoom    = 2 * demoEnough // of all clients
	demoLimit   = 2 * time.Minute
)

func newCacheDemo() *cobra.Command {
	return &cobra.Command{
		Use:   "demo",
		Short: "Kill a cache under load, start it again, and load all that was committed",
		Long: fmt.Sprintf(`Start a server of a cache of %s in /dev/shm and %d clients that store
blocks. End the server by SIGKILL while they do, start it again, and load every block of
which a client had the word that it is committed: all bytes are checked. Nothing is left.`,
			figures.FormatSize(2*demoRoom*demoBlock), demoClients),
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), demoLimit)
			defer cancel()
			return cacheDemo(ctx, c.OutOrStdout())
		},
	}
}

// cacheDemo is the story of the demonstration.
func cacheDemo(ctx context.Context, stdout io.Writer) (err error) {
	server, err := newOwnServer("", `name = "demo"`, fmt.Sprint("bytes = ",
		2*demoRoom*demoBlock), "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.remove()) }()
	say := func(format string, args ...any) { fmt.Fprintf(stdout, format+"\n", args...) }

	// A server, and clients that store until it is gone: the one that stores the last block of
	// enough ends it, while the others store.
	line, err := server.start()
	if err != nil {
		return err
	}
	say("%s", line)
	var stored atomic.Int64
	var clients sync.WaitGroup
	var committed [demoClients][]cache.Key
	var ended [demoClients]error
	for n := range demoClients {
		clients.Go(func() {
			u, err := openModelUser(ctx, server.socket, fmt.Sprint("client ", n), demoBlock,
				demoChain)
			if err != nil {
				ended[n] = err
				return
			}
			for at := 0; err == nil && at < demoRoom/demoClients; at += demoChain {
				chain := make([]cache.Key, demoChain)
				for k := range chain {
					chain[k] = cache.KeyOf(fmt.Append(nil, n, at+k))
				}
				var q requestResult
				if q, err = u.handle(ctx, chain); err == nil && q.stored == demoChain {
					committed[n] = append(committed[n], chain...)
					if stored.Add(demoChain) == demoEnough {
						_ = server.process.Process.Kill()
					}
				}
			}
			ended[n] = err
			_ = u.close() // its peer is gone
		})
	}
	clients.Wait()
	keys := slices.Concat(committed[:]...)
	if len(keys) < demoEnough {
		return fmt.Errorf("%d blocks were committed, want %d: %w", len(keys), demoEnough,
			errors.Join(append(ended[:], context.Cause(ctx))...))
	}
	_ = server.process.Wait() // it was killed
	say("SIGKILL while %d clients store: %d blocks, %s, were committed", demoClients, len(keys),
		figures.RoundSize(uint64(len(keys))*demoBlock))

	// It starts again, and serves them.
	if line, err = server.start(); err != nil {
		return err
	}
	say("%s", line)
	u, err := openModelUser(ctx, server.socket, "reader", demoBlock, demoChain)
	if err != nil {
		return err
	}
	served := 0
	for chain := range slices.Chunk(keys, demoChain) {
		q, err := u.handle(ctx, chain) // what is lost it stores
		if err != nil {
			return errors.Join(err, u.close())
		}
		served += q.hits - q.wrong
	}
	say("%d of %d committed blocks are served, every byte was checked", served, len(keys))
	if served < len(keys) {
		err = fmt.Errorf("%d blocks are lost", len(keys)-served)
	}
	err = errors.Join(err, u.close(), server.process.Process.Signal(syscall.SIGTERM))
	if err != nil {
		return err
	}
	if err := server.process.Wait(); err != nil {
		return fmt.Errorf("the server did not end in order: %w", err)
	}
	return nil
}
