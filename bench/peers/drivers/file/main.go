// SPDX-License-Identifier: Apache-2.0

// File keeps a file for the participants of lane file: it is their target, which moves nothing. Its
// argument is a folder on the disk that is measured. The file has no name: its card is a path of
// /proc, and it ends with the process. See package peers.
package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench/peers"
)

func main() {
	if err := drive(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "drivers/file:", err)
		os.Exit(1)
	}
}

func drive(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, a folder")
	}
	return peers.Serve(&end{folder: args[0]})
}

// end is the file.
type end struct {
	folder string
	*os.File
	bytes int64
}

// block is what is written and read at a time where all of the file is.
const block = 8 << 20

// Open implements peers.End.
func (e *end) Open(r *peers.Request) (peers.Answer, error) {
	f, err := os.CreateTemp(e.folder, "peers-*")
	if err != nil {
		return peers.Answer{}, err
	}
	e.File, e.bytes = f, int64(r.Bytes)
	if err := errors.Join(os.Remove(f.Name()), e.fill(), e.Cache(false)); err != nil {
		return peers.Answer{}, err
	}
	card, err := json.Marshal(map[string]any{"path": fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(),
		f.Fd()), "bytes": r.Bytes})
	return peers.Answer{Version: "a file", Card: base64.StdEncoding.EncodeToString(card),
		Settings: "a file on " + e.system()}, err
}

func (e *end) fill() error {
	random := rand.NewChaCha8([32]byte{1})
	_, err := io.CopyBuffer(struct{ io.Writer }{e.File}, io.LimitReader(random, e.bytes),
		make([]byte, block))
	return err
}

// names are file systems by their numbers, as statfs(2) has them.
var names = map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs",
	unix.BTRFS_SUPER_MAGIC:     "btrfs",
	unix.TMPFS_MAGIC:           "tmpfs, which is memory and no disk",
	unix.OVERLAYFS_SUPER_MAGIC: "overlayfs"}

func (e *end) system() string {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(e.Fd()), &fs); err != nil {
		return "a disk"
	}
	if name, ok := names[int64(fs.Type)]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", fs.Type)
}

// Cache implements peers.Keeper.
func (e *end) Cache(all bool) error {
	if all {
		_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.NewSectionReader(e.File, 0,
			e.bytes), make([]byte, block))
		return err
	}
	if err := unix.Fdatasync(int(e.Fd())); err != nil {
		return fmt.Errorf("write the file back: %w", os.NewSyscallError("fdatasync", err))
	}
	return os.NewSyscallError("fadvise", unix.Fadvise(int(e.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// Memory implements peers.End: what Serve fills is none of the file.
func (e *end) Memory() []byte { return nil }

// Connect implements peers.End.
func (e *end) Connect(string) error { return nil }

func (e *end) none() error { return fmt.Errorf("it keeps a file: %w", peers.ErrUnsupported) }

// Prepare implements peers.End.
func (e *end) Prepare(string, uint64, []int32, []int32) (peers.Posting, error) {
	return nil, e.none()
}

// Regions implements peers.End.
func (e *end) Regions(int, uint64) (peers.Answer, error) { return peers.Answer{}, e.none() }

// Notify implements peers.End.
func (e *end) Notify([]byte) error { return e.none() }

// Receive implements peers.End.
func (e *end) Receive() (bool, error) { return false, e.none() }
