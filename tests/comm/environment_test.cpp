#include <tessera/comm/environment.h>

#include <map>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

std::optional<LaunchInfo> info_of(const std::map<std::string, std::string>& environment) {
  return launch_info([&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    return found == environment.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(Environment, WithoutALauncherThereIsNothing) {
  EXPECT_FALSE(info_of({}));
  EXPECT_FALSE(info_of({{"RANK", ""}, {"MASTER_ADDR", "somewhere"}}));
}

TEST(Environment, Torchrun) {
  const auto info = info_of({{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "torchrun");
  EXPECT_EQ(info->rank, 5);
  EXPECT_EQ(info->size, 8);
  EXPECT_EQ(info->local_rank, 1);
  EXPECT_EQ(info->master_address, "node7");
  EXPECT_EQ(info->master_port, 1234);
  EXPECT_FALSE(info->agent_store);
  const auto agent = info_of({{"RANK", "0"},
                              {"WORLD_SIZE", "1"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_TRUE(agent->agent_store);
  EXPECT_EQ(agent->attempt, 2);
}

TEST(Environment, Mpirun) {
  const auto info = info_of({{"OMPI_COMM_WORLD_RANK", "1"},
                             {"OMPI_COMM_WORLD_SIZE", "4"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "mpirun");
  EXPECT_EQ(info->rank, 1);
  EXPECT_EQ(info->size, 4);
  EXPECT_EQ(info->master_address, "127.0.0.1");
  EXPECT_THAT(error_of([] {
                info_of({{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
              }),
              HasSubstr("MASTER_ADDR"));
}

TEST(Environment, Slurm) {
  const auto info = info_of({{"SLURM_PROCID", "3"},
                             {"SLURM_NTASKS", "16"},
                             {"SLURM_LOCALID", "3"},
                             {"SLURM_JOB_NODELIST", "gpu[03-05,09]"},
                             {"SLURM_JOB_ID", "123456"}});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "slurm");
  EXPECT_EQ(info->rank, 3);
  EXPECT_EQ(info->size, 16);
  EXPECT_EQ(info->master_address, "gpu03");
  EXPECT_EQ(info->master_port, 20000 + 123456 % 20000);
}

TEST(Environment, SlurmNodeLists) {
  EXPECT_EQ(first_slurm_host("login1"), "login1");
  EXPECT_EQ(first_slurm_host("a,b"), "a");
  EXPECT_EQ(first_slurm_host("gpu[03-05,09],login1"), "gpu03");
  EXPECT_EQ(first_slurm_host("rack1-n[7]"), "rack1-n7");
  EXPECT_EQ(first_slurm_host("rack[1-2,5]n[04-07]-ib,a"), "rack1n04-ib");
  for (const char* text : {"gpu[]", "gpu[,1]", "gpu[-3]", "gpu[a-b]", "gpu[1[2]]"})
    EXPECT_THAT(error_of([&] { first_slurm_host(text); }), HasSubstr("no number or range"));
  EXPECT_THAT(error_of([] { first_slurm_host("gpu[03"); }), HasSubstr("not closed"));
  EXPECT_THAT(error_of([] { first_slurm_host(""); }), HasSubstr("does not begin with a host"));
}

TEST(Environment, BadValuesNameTheVariable) {
  EXPECT_THAT(error_of([] {
                info_of({{"RANK", "one"}, {"WORLD_SIZE", "2"}});
              }),
              AllOf(HasSubstr("RANK"), HasSubstr("\"one\"")));
  EXPECT_THAT(error_of([] {
                info_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
              }),
              AllOf(HasSubstr("RANK"), HasSubstr("from 0 to 1")));
  EXPECT_THAT(error_of([] { info_of({{"RANK", "0"}}); }), HasSubstr("WORLD_SIZE is missing"));
  EXPECT_THAT(error_of([] {
                info_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "99999"}});
              }),
              HasSubstr("MASTER_PORT"));
}

}  // namespace
}  // namespace tessera
