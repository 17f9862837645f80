// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
)

// fileKeeper keeps a file for the participants of lane file: it is their target, which moves
// nothing. The file has no name: its card is a path of /proc, and it ends with the process.
type fileKeeper struct {
	base
	folder string // on the disk that is measured
	*os.File
	bytes int64
}

func newFile(args []string) (end, error) {
	if len(args) != 1 {
		return nil, errors.New("want one argument, a folder")
	}
	return &fileKeeper{folder: args[0]}, nil
}

// copyBlock is the number of bytes of one call that reads or writes a whole file.
const copyBlock = 8 << 20

// Open implements bench.End.
func (e *fileKeeper) Open(r *bench.Request) (bench.Answer, error) {
	f, err := os.CreateTemp(e.folder, "peers-*")
	if err != nil {
		return bench.Answer{}, err
	}
	e.File, e.bytes = f, int64(r.Bytes)
	if err := errors.Join(os.Remove(f.Name()), e.fill(), e.Cache(false)); err != nil {
		return bench.Answer{}, err
	}
	card, err := json.Marshal(fileCard{fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()), r.Bytes})
	return bench.Answer{Version: "a file", Card: base64.StdEncoding.EncodeToString(card),
		Settings: "a file on " + e.system()}, err
}

func (e *fileKeeper) fill() error {
	random := rand.NewChaCha8([32]byte{1})
	_, err := io.CopyBuffer(struct{ io.Writer }{e.File}, io.LimitReader(random, e.bytes),
		make([]byte, copyBlock))
	return err
}

// fileSystems are file systems by their numbers, as statfs(2) has them.
var fileSystems = map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs",
	unix.BTRFS_SUPER_MAGIC:     "btrfs",
	unix.TMPFS_MAGIC:           "tmpfs, which is memory and no disk",
	unix.OVERLAYFS_SUPER_MAGIC: "overlayfs"}

func (e *fileKeeper) system() string {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(e.Fd()), &fs); err != nil {
		return "a disk"
	}
	if name, ok := fileSystems[int64(fs.Type)]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", fs.Type)
}

// fileCard is where the file is.
type fileCard struct {
	Path  string `json:"path"`
	Bytes uint64 `json:"bytes"`
}

func readFileCard(text string) (c fileCard, err error) {
	b, err := base64.StdEncoding.DecodeString(text)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		err = fmt.Errorf("read the card: %w", err)
	}
	return c, err
}

// Cache implements bench.Keeper.
func (e *fileKeeper) Cache(all bool) error {
	if all {
		_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.NewSectionReader(e.File, 0,
			e.bytes), make([]byte, copyBlock))
		return err
	}
	if err := unix.Fdatasync(int(e.Fd())); err != nil {
		return fmt.Errorf("write the file back: %w", os.NewSyscallError("fdatasync", err))
	}
	return os.NewSyscallError("fadvise", unix.Fadvise(int(e.Fd()), 0, 0, unix.FADV_DONTNEED))
}
