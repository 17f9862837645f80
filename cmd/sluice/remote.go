// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
)

// remoteFlags are for commands that reach another engine's regions.
type remoteFlags struct {
	memberFlags
	peer string
}

func (r *remoteFlags) register(c *cobra.Command) {
	r.registerPeer(c)
	r.registerBackends(c)
}

// registerPeer is register without --backend, which some commands have for something else.
func (r *remoteFlags) registerPeer(c *cobra.Command) {
	c.Flags().StringVar(&r.peer, "peer", "", "HOST:PORT where it serves: what sluice agent prints")
	r.registerIdentity(c)
}

func (r *remoteFlags) check() error {
	if r.peer == "" {
		return usagef("--peer is missing: say where the agent serves, such as 10.0.0.2:7000")
	}
	if _, _, err := net.SplitHostPort(r.peer); err != nil {
		return usagef("--peer %q: want HOST:PORT", r.peer)
	}
	return r.memberFlags.check()
}

// with runs f with the peer. When ctx ends the engine is closed, and with it what f does.
func (r *remoteFlags) with(ctx context.Context, f func(e *engine.Engine, p *engine.Peer) error) (
	err error) {
	host, err := ownAddress(r.peer)
	if err != nil {
		return fmt.Errorf("reach %s: %w", r.peer, err)
	}
	e, err := r.open(net.JoinHostPort(host, "0"), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	defer context.AfterFunc(ctx, func() { _ = e.Close() })()
	p, err := e.Dial(ctx, "tcp", r.peer)
	if err != nil {
		return fmt.Errorf("%s: %w", r.peer, err)
	}
	return f(e, p)
}

// listed is a region in the output of ls.
type listed struct {
	Name     string `json:"name"`
	Kind     string `json:"kind"`
	Size     uint64 `json:"size"`
	ReadOnly bool   `json:"read_only"`
	Route    string `json:"route"` // the backend that would move its bytes; empty: none can
}

func newLs() *cobra.Command {
	var r remoteFlags
	var asJSON bool
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the regions of an agent, and how they are reached",
		Example: "  sluice ls --peer 10.0.0.2:7000 --cert b.pem --key b-key.pem --ca ca.pem",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := r.check(); err != nil {
				return err
			}
			list := []listed{}
			err := r.with(c.Context(), func(e *engine.Engine, p *engine.Peer) (err error) {
				list, err = listRegions(e, p)
				return err
			})
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(c.OutOrStdout(), list)
			}
			return printRegions(c.OutOrStdout(), list)
		},
	}
	r.register(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func listRegions(e *engine.Engine, p *engine.Peer) ([]listed, error) {
	list := []listed{}
	err := eachRegion(e, p, func(m *engine.Remote, x engine.Explanation) {
		list = append(list, listed{m.Name(), m.Kind().String(), m.Size(), m.ReadOnly(), x.Chosen})
	})
	return list, err
}

// eachRegion explains the way from a little host memory to each region of the peer.
func eachRegion(e *engine.Engine, p *engine.Peer, f func(*engine.Remote, engine.Explanation)) (
	err error) {
	m, err := e.Alloc(1<<16, engine.AllocOptions{Purpose: "sample"})
	if err != nil {
		return err
	}
	local, err := e.RegisterPrivate("sample", m.Segment())
	if err != nil {
		return errors.Join(err, m.Close())
	}
	defer func() { err = errors.Join(err, local.Close(), m.Close()) }()
	for _, name := range p.Remotes() {
		there, err := p.Remote(name)
		if err != nil {
			continue // closed just now
		}
		x, err := e.Explain(p, local, there)
		if err != nil {
			return err
		}
		f(there, x)
	}
	return nil
}

func printRegions(w io.Writer, list []listed) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tSIZE\tKIND\tACCESS\tROUTE")
	for _, r := range list {
		access, route := "read, write", r.Route
		if r.ReadOnly {
			access = "read"
		}
		if route == "" {
			route = "none"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", r.Name, bench.FormatSize(r.Size), r.Kind, access,
			route)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// rangeFlags name a range of a region.
type rangeFlags struct {
	remoteFlags
	offset, length string
	file           string
	asJSON         bool
}

func (r *rangeFlags) register(c *cobra.Command, file, use string) {
	r.remoteFlags.register(c)
	c.Flags().StringVar(&r.offset, "offset", "0", "where the range begins in the region: bytes, "+
		"or with a unit such as 4KiB")
	c.Flags().StringVar(&r.length, "length", "", "of the range; without it to the end of "+
		"the region, or of what is put")
	c.Flags().StringVar(&r.file, file, "-", use)
	c.Flags().BoolVar(&r.asJSON, "json", false, "print how many bytes and seconds as JSON (get "+
		"to standard output: on standard error)")
}

// span is the range in bytes; all: to the end.
func (r *rangeFlags) span() (off, n uint64, all bool, err error) {
	if off, err = parseOffset(r.offset); err != nil {
		return 0, 0, false, usagef("--offset: %v", err)
	}
	if r.length == "" {
		return off, 0, true, nil
	}
	if n, err = parseOffset(r.length); err != nil {
		return 0, 0, false, usagef("--length: %v", err)
	}
	return off, n, false, nil
}

func newGet() *cobra.Command {
	var r rangeFlags
	c := &cobra.Command{
		Use:   "get NAME",
		Short: "Read a range of an agent's region",
		Example: "  sluice get kv --peer 10.0.0.2:7000 --cert b.pem --key b-key.pem --ca ca.pem " +
			"--length 4KiB | xxd | head",
		Args: words("the name of a region"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := r.check(); err != nil {
				return err
			}
			return r.get(c.Context(), args[0], c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	r.register(c, "output", "file to write to, replaced once all bytes are there; -: "+
		"standard output")
	return c
}

func (r *rangeFlags) get(ctx context.Context, name string, stdout, stderr io.Writer) error {
	off, n, all, err := r.span()
	if err != nil {
		return err
	}
	return r.with(ctx, func(_ *engine.Engine, p *engine.Peer) (err error) {
		m, err := p.Remote(name)
		if err != nil {
			return err
		}
		if err := inside(m, off, n, all); err != nil {
			return err
		}
		if all {
			n = m.Size() - off
		}
		w, keep, err := r.create(ctx, stdout)
		if err != nil {
			return err
		}
		from := io.NewSectionReader(m, int64(off), int64(n))
		return keep(r.move(ctx, w, from, "read", stdout, stderr))
	})
}

// create opens the output. A file is written beside its place; keep moves it there unless the
// transfer has failed.
func (r *rangeFlags) create(ctx context.Context, stdout io.Writer) (io.Writer, func(error) error,
	error) {
	if r.file == "-" {
		return stdout, func(err error) error { return err }, nil
	}
	if info, err := os.Stat(r.file); err == nil && !info.Mode().IsRegular() {
		f, err := interruptible(ctx, func() (*os.File, error) {
			// a device or a pipe cannot be replaced
			return os.OpenFile(r.file, os.O_WRONLY, 0)
		})
		if err != nil {
			return nil, nil, &usageError{err}
		}
		return f, func(err error) error { return errors.Join(err, f.Close()) }, nil
	}
	f, err := os.CreateTemp(filepath.Dir(r.file), "."+filepath.Base(r.file)+".*")
	if err != nil {
		var path *os.PathError
		if errors.As(err, &path) {
			path.Path = r.file // not that of the one beside it
		}
		return nil, nil, &usageError{err}
	}
	return f, func(err error) error {
		if err == nil {
			err = f.Chmod(0o666 &^ umask())
		}
		if err = errors.Join(err, f.Close()); err == nil {
			err = os.Rename(f.Name(), r.file)
		}
		if err != nil {
			_ = os.Remove(f.Name())
		}
		return err
	}, nil
}

// umask returns the mask of the process. It belongs to the whole process, which opens no other
// file meanwhile.
func umask() os.FileMode {
	mask := syscall.Umask(0)
	syscall.Umask(mask)
	return os.FileMode(mask)
}

// moveBytes is how much get and put hold of what they move.
const moveBytes = 4 << 20

// moved is what get and put print with --json.
type moved struct {
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
}

// move copies, and reports what it did. A signal ends it even where standard input is silent.
func (r *rangeFlags) move(ctx context.Context, to io.Writer, from io.Reader, verb string, stdout,
	stderr io.Writer) error {
	type result struct {
		n   int64
		err error
	}
	start, ended := time.Now(), make(chan result, 1)
	counted := &countedWriter{to: to}
	go func() {
		n, err := io.CopyBuffer(counted, onlyReader{from}, make([]byte, moveBytes))
		ended <- result{n, err}
	}()
	select {
	case x := <-ended:
		if x.err != nil {
			return fmt.Errorf("after %d bytes: %w", x.n, x.err)
		}
		took := time.Since(start)
		if r.asJSON && to == stdout {
			return printJSON(stderr, moved{x.n, took.Seconds()}) // the bytes have standard output
		}
		if r.asJSON {
			return printJSON(stdout, moved{x.n, took.Seconds()})
		}
		fmt.Fprintf(stderr, "%d bytes %s in %v\n", x.n, verb, took.Round(time.Millisecond))
		return nil
	case <-ctx.Done():
		return &partError{counted.n.Load()}
	}
}

// partError is the interrupt of get or put.
type partError struct{ n int64 }

func (e *partError) Error() string { return fmt.Sprintf("interrupted after %d bytes", e.n) }

// onlyReader and countedWriter keep io.Copy from other ways, which take other pieces.
type onlyReader struct{ io.Reader }

type countedWriter struct {
	to io.Writer
	n  atomic.Int64 // bytes that were written
}

func (c *countedWriter) Write(b []byte) (int, error) {
	n, err := c.to.Write(b)
	c.n.Add(int64(n))
	return n, err
}
