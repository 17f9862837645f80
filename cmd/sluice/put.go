// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/engine"
)

func newPut() *cobra.Command {
	var r rangeFlags
	c := &cobra.Command{
		Use:   "put NAME",
		Short: "Write a range of an agent's region",
		Long: `Write a range of an agent's region. A file that does not fit into the region is refused
before a byte is written; of a pipe that does not, what fits has been written.`,
		Example: "  echo hello | sluice put kv --offset 4KiB --peer 10.0.0.2:7000 --cert b.pem " +
			"--key b-key.pem --ca ca.pem",
		Args: words("the name of a region"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := r.check(); err != nil {
				return err
			}
			return r.put(c.Context(), args[0], c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	r.register(c, "input", "file to read from; -: standard input")
	return c
}

func (r *rangeFlags) put(ctx context.Context, name string, stdin io.Reader, stdout,
	stderr io.Writer) error {
	off, n, all, err := r.span()
	if err != nil {
		return err
	}
	in := stdin
	if r.file != "-" {
		f, err := openInput(ctx, r.file)
		if err != nil {
			return &usageError{err}
		}
		defer f.Close()
		in = f
	}
	has, known, err := inputBytes(in)
	if err != nil {
		return err
	}
	if !all && known && has < n {
		return usagef("the input has %d bytes, --length %d", has, n)
	}
	return r.with(ctx, func(_ *engine.Engine, p *engine.Peer) error {
		m, err := p.Remote(name)
		if err != nil {
			return err
		}
		if m.ReadOnly() {
			return fmt.Errorf("region %s is read-only: where sluice agent serves it, say :rw "+
				"behind its file: --region %s=FILE:rw", name, name)
		}
		if err := inside(m, off, n, all); err != nil {
			return err
		}
		room := m.Size() - off
		switch {
		case !all:
			in = &exactReader{from: in, left: n}
		case known && has > 0 && room == 0:
			return usagef("region %s ends at %d: nothing was written; say a smaller --offset", name,
				off)
		case known && has > room:
			return usagef("the input has %d bytes, and region %s room for %d from %d on: nothing "+
				"was written; say --length %d for the first of them",
				has, name, room, off, room)
		default:
			in = &roomReader{from: in, left: room, region: name, room: room}
		}
		return r.move(ctx, io.NewOffsetWriter(m, int64(off)), in, "written", stdout, stderr)
	})
}

// inside wants a range to lie in a region.
func inside(m *engine.Remote, off, n uint64, all bool) error {
	switch {
	case off > m.Size():
		return usagef("region %s has %d bytes: --offset %d is past its end", m.Name(), m.Size(),
			off)
	case !all && n > m.Size()-off:
		return usagef("region %s has %d bytes: %d at %d are past its end", m.Name(), m.Size(), n,
			off)
	}
	return nil
}

// inputBytes returns how many bytes a reader has left, where that is known before they are read.
func inputBytes(in io.Reader) (n uint64, known bool, err error) {
	f, ok := in.(*os.File)
	if !ok {
		return 0, false, nil
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		return 0, false, err
	case info.IsDir():
		return 0, false, usagef("%s is a directory: name a file", f.Name())
	case !info.Mode().IsRegular() || info.Size() == 0: // files of /proc have no size
		return 0, false, nil
	}
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, false, err
	}
	return uint64(max(info.Size()-at, 0)), true, nil
}

// exactReader reads exactly left bytes: fewer are an error.
type exactReader struct {
	from io.Reader
	left uint64
}

func (e *exactReader) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	n, err := e.from.Read(p[:min(uint64(len(p)), e.left)])
	e.left -= uint64(n)
	if err == io.EOF && e.left > 0 {
		err = fmt.Errorf("the input ends %d bytes before --length: %w", e.left, io.ErrUnexpectedEOF)
	}
	return n, err
}

// roomReader reads as much as there is room for: more is an error.
type roomReader struct {
	from       io.Reader
	left, room uint64
	region     string
}

func (r *roomReader) Read(p []byte) (int, error) {
	if r.left > 0 {
		n, err := r.from.Read(p[:min(uint64(len(p)), r.left)])
		r.left -= uint64(n)
		return n, err
	}
	var one [1]byte
	if n, err := r.from.Read(one[:]); n == 0 {
		return 0, err
	}
	return 0, fmt.Errorf("region %s is full, and the input goes on: say --length %d for as much, "+
		"or write to a larger region",
		r.region, r.room)
}
