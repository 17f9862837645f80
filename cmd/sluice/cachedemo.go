// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
			return cacheDemo(ctx, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
}

// cacheDemo is the story of the demonstration.
func cacheDemo(ctx context.Context, stdout, stderr io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "sluice-demo-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	memory := filepath.Join("/dev/shm", filepath.Base(dir))
	defer os.Remove(memory)
	socket, config := filepath.Join(dir, "s"), filepath.Join(dir, "cache.toml")
	text := fmt.Sprintf("name = \"demo\"\nsocket = %q\n[memory]\npath = %q\nbytes = %d\n", socket,
		memory, 2*demoRoom*demoBlock)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	say := func(format string, args ...any) { fmt.Fprintf(stdout, format+"\n", args...) }

	// A server, and clients that store until it is gone: the one that stores the last block of
	// enough ends it, while the others store.
	server, line, err := startServer(config, stderr)
	if err != nil {
		return err
	}
	defer func() { _ = server.Process.Kill(); _ = server.Wait() }() // unless it has ended
	say("%s", line)
	var stored atomic.Int64
	var clients sync.WaitGroup
	var committed [demoClients][]cache.Key
	var ended [demoClients]error
	for n := range demoClients {
		clients.Go(func() {
			committed[n], ended[n] = storeUntilLost(ctx, socket, n, func() {
				if stored.Add(demoChain) == demoEnough {
					_ = server.Process.Kill()
				}
			})
		})
	}
	clients.Wait()
	keys := slices.Concat(committed[:]...)
	if len(keys) < demoEnough {
		return fmt.Errorf("%d blocks were committed, want %d: %w", len(keys), demoEnough,
			errors.Join(append(ended[:], context.Cause(ctx))...))
	}
	_ = server.Wait() // it was killed
	say("SIGKILL while %d clients store: %d blocks, %s, were committed", demoClients, len(keys),
		figures.RoundSize(uint64(len(keys))*demoBlock))

	// It starts again, and serves them.
	again, line, err := startServer(config, stderr)
	if err != nil {
		return err
	}
	defer func() { _ = again.Process.Kill(); _ = again.Wait() }() // unless it has ended
	say("%s", line)
	u, err := openModelUser(ctx, socket, "reader", demoBlock, demoChain)
	if err != nil {
		return err
	}
	served := 0
	for chain := range slices.Chunk(keys, demoChain) {
		q, err := u.serve(ctx, chain, demoChain) // what is lost it stores
		if err != nil {
			return errors.Join(err, u.close())
		}
		served += q.hits - q.wrong
	}
	say("%d of %d committed blocks are served, every byte was checked", served, len(keys))
	if served < len(keys) {
		err = fmt.Errorf("%d blocks are lost", len(keys)-served)
	}
	if err := errors.Join(err, u.close(), again.Process.Signal(syscall.SIGTERM)); err != nil {
		return err
	}
	if err := again.Wait(); err != nil {
		return fmt.Errorf("the server did not end in order: %w", err)
	}
	return nil
}

// storeUntilLost stores chains of new blocks until the server is lost, or the client has stored its
// share, and returns the keys of those that it had the word of.
func storeUntilLost(ctx context.Context, socket string, n int, stored func()) (done []cache.Key,
	err error) {
	u, err := openModelUser(ctx, socket, fmt.Sprint("client ", n), demoBlock, demoChain)
	if err != nil {
		return nil, err
	}
	defer func() { _ = u.close() }() // its peer is gone
	for len(done) < demoRoom/demoClients {
		keys := make([]cache.Key, demoChain)
		for k := range keys {
			keys[k] = cache.KeyOf(fmt.Append(nil, n, len(done)+k))
		}
		q, err := u.serve(ctx, keys, demoChain)
		if err == nil && q.stored < demoChain {
			err = fmt.Errorf("%d of %d blocks that nobody has were stored", q.stored, demoChain)
		}
		if err != nil {
			return done, err
		}
		done = append(done, keys...)
		stored()
	}
	return done, nil
}

// startServer starts a server as a child process, and returns its first line.
func startServer(config string, stderr io.Writer) (*exec.Cmd, string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, "", err
	}
	c := exec.Command(self, "cache", "serve", "--config", config)
	c.Stderr = stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return nil, "", fmt.Errorf("start a server: %w", err)
	}
	line := bufio.NewScanner(out)
	if !line.Scan() {
		return nil, "", fmt.Errorf("the server did not begin: %w", c.Wait())
	}
	return c, line.Text(), nil
}
